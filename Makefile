# Each target works from a bare Debian or Ubuntu machine with git, make and python3; bringup/bootstrap.py says
# what it installs and why.
STACK ?= lab
HOSTS ?= 2
GPUS ?= 8x NVIDIA RTX PRO 6000 Blackwell Server Edition
PYTHON ?= python3
VENV := .venv/bin
PYTEST := $(VENV)/python -m pytest

.PHONY: up test test-quick test-lab test-bootstrap test-real check clean venv lock-dependencies

venv:
	@$(PYTHON) bringup/bootstrap.py

up:
	@$(PYTHON) bringup/bootstrap.py --system lab
	@$(VENV)/bringup lab up --hosts $(HOSTS) --gpus "$(GPUS)"
	@$(VENV)/bringup apply inventory/lab.py --stack $(STACK) --yes

check: venv
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports

test-quick: venv
	@$(PYTEST) -m "not lab and not real and not bootstrap" -q

test: 
	@$(PYTHON) bringup/bootstrap.py --system lab --system test
	@$(MAKE) --no-print-directory check
	@$(PYTEST) -m "not real" -q

test-real:
	@$(PYTHON) bringup/bootstrap.py --system lab --system test
	@$(PYTEST) -m "real" -q

clean:
	@if [ -x $(VENV)/bringup ]; then $(VENV)/bringup lab down; fi
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build .venv
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock-dependencies: venv
	@$(VENV)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-header --all-extras pyproject.toml -o requirements.lock
