# Each target works from a bare Debian or Ubuntu machine with git, make and python3; bringup/bootstrap.py says
# what it installs and why.
STACK ?= lab
HOSTS ?= 2
GPUS ?=
PYTHON ?= python3
VENV := .venv/bin
TEST_CACHE := $(or $(BRINGUP_TEST_CACHE),/var/cache/bringup-tests)
PYTEST := $(VENV)/python -m pytest

.PHONY: up test test-quick test-lab test-bootstrap test-real test-crash test-fleet check clean venv lock-dependencies

venv:
	@$(PYTHON) bringup/bootstrap.py $(if $(SYSTEM),--system lab --system test)

up:
	@$(PYTHON) bringup/bootstrap.py --system lab
	@$(VENV)/bringup lab up --hosts $(HOSTS) $(if $(GPUS),--gpus "$(GPUS)") --stack $(STACK)
	@$(VENV)/bringup apply inventory/lab.py --stack $(STACK) --yes

check: venv
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports

test-quick: venv
	@$(PYTEST) -m "not lab and not real and not bootstrap and not slow" -q

test: 
	@$(PYTHON) bringup/bootstrap.py --system lab --system test
	@$(MAKE) --no-print-directory check
	@$(PYTEST) -m "not real" -q

test-real:
	@$(PYTHON) bringup/bootstrap.py --system lab --system test
	@$(PYTEST) -m real -q $(TESTS)

test-crash test-fleet:
	@$(PYTHON) bringup/bootstrap.py --system lab --system test
	@$(PYTEST) -m "$(@:test-%=%) and not real" -q

clean:
	@if [ -x $(VENV)/bringup ]; then $(VENV)/bringup lab down --purge; fi
	@rm -rf $(TEST_CACHE)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build .venv
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock-dependencies: venv
	@$(VENV)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-header --all-extras pyproject.toml -o requirements.lock
