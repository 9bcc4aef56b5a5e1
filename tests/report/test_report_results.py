"""The results document: counted right, and as its schema says."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import ValidationError
from report_case import DRIFT, FAILED, OK, STACK, UNKNOWN, whole

from bringup import paths
from bringup.finding import Finding
from bringup.report import events, results
from bringup.report.results import DifferenceResult, FindingResult, HostResult, Results, Summary

REFERENCE = paths.root() / "docs" / "reference"


@pytest.mark.parametrize("module", [results, events], ids=["results", "events"])
def test_the_committed_schema_is_that_of_the_models(module: object) -> None:
    """Fails after a change of the models: write ``json_schema()`` to the file, sorted, indented by one."""
    name = module.__name__.rsplit(".", 1)[1]  # type: ignore[attr-defined]
    wanted = json.dumps(module.json_schema(), indent=1, sort_keys=True) + "\n"  # type: ignore[attr-defined]
    assert (REFERENCE / f"{name}.schema.json").read_text() == wanted


def test_a_document_fits_its_schema_and_reads_back() -> None:
    document = whole()
    schema = json.loads((REFERENCE / "results.schema.json").read_text())
    jsonschema.validate(json.loads(document.as_json()), schema)
    assert Results.model_validate_json(document.as_json()) == document


def test_hosts_are_counted_by_status() -> None:
    assert whole().summary == Summary(
        hosts=6, ok=1, changed=1, drift=1, slow=1, refused=1, unknown=1, failed=1, changes=2
    )
    assert list(whole().hosts) == sorted(whole().hosts)


def test_a_plan_counts_differences_and_no_changed_host() -> None:
    summary = Results.of("plan", {"a": DRIFT, "b": DRIFT}, stack=STACK).summary
    assert (summary.changes, summary.changed) == (4, 0)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [({}, 0), ({"a": OK}, 0), ({"a": OK, "b": DRIFT}, 1), ({"a": UNKNOWN}, 1), ({"a": FAILED}, 1)],
    ids=["none", "ok", "drift", "unknown", "failed"],
)
def test_exit_code(hosts: dict[str, HostResult], expected: int) -> None:
    assert Results.of("drift", hosts, stack=None).exit_code == expected


def test_a_finding_keeps_what_it_says() -> None:
    finding = Finding("BU-APT-001", "error", "half configured", "run dpkg", {"wanted": 1, "found": [None]})
    assert FindingResult.of(finding).model_dump() == finding.as_json()


def test_a_difference_is_read_from_whatever_has_its_attributes() -> None:
    class Difference:
        path, wanted, found = "a.b", "1", None

    assert DifferenceResult.model_validate(Difference()) == DifferenceResult(path="a.b", wanted="1")


@pytest.mark.parametrize(
    "wrong",
    [{"status": "fine"}, {"status": "ok", "changes": -1}, {"status": "ok", "colour": "red"}],
    ids=["status", "negative", "unknown-key"],
)
def test_a_wrong_result_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        HostResult.model_validate(wrong)


def test_the_worst_finding_speaks_for_the_host() -> None:
    def finding(code: str, severity: str) -> FindingResult:
        return FindingResult(code=code, severity=severity, cause="c", remedy="r")  # type: ignore[arg-type]

    told = (finding("BU-PRE-001", "warning"), finding("BU-PRE-002", "error"), finding("BU-PRE-003", "error"))
    assert HostResult(status="refused", findings=told).worst_finding == told[1]
    assert OK.worst_finding is None
