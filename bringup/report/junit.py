"""Write results as JUnit XML, so that a CI system shows hosts as it shows tests.

One suite per host; in it one case for the host itself and one for each step, difference, error and backend.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from bringup.report import text
from bringup.report.results import HostResult, Results

# What XML 1.0 does not allow, whatever way it is written: section 2.2, production [2] Char.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(results: Results) -> str:
    """Return the XML document. A host that is unknown is an error, any other that is not ok a failure."""
    suites = ET.Element("testsuites", name=f"bringup {results.command}")
    for name, host in results.hosts.items():
        suites.append(_suite(results.command, name, host))
    for attribute in ("tests", "failures", "errors", "skipped"):
        suites.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in suites)))
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _suite(command: str, name: str, host: HostResult) -> ET.Element:
    suite = ET.Element("testsuite", name=_clean(name))
    _host_case(_case(suite, command, name, "host", host.seconds), host)
    for step in host.steps:
        case = _case(suite, command, name, f"step {step.name}", step.seconds)
        if step.status == "failed":
            _add(case, "failure", "step", f"{step.name} failed")
        elif step.status in ("skipped", "planned"):
            _add(case, "skipped", None, step.status)
    for difference in host.differences:
        case = _case(suite, command, name, f"difference {difference.path}")
        # What apply changed was a difference before, and is none any more.
        if not host.changes or host.status != "ok":
            told = f"wanted: {text.shown(difference.wanted)}\nfound: {text.shown(difference.found)}"
            _add(case, "failure", "difference", difference.path, told)
    for finding in host.findings:
        if finding.severity == "error":
            case = _case(suite, command, name, f"finding {finding.code}")
            _add(case, "failure", finding.code, finding.cause, f"do: {finding.remedy}")
    for backend in host.verification.backends if host.verification else ():
        payload = f" {text.size(backend.payload_bytes)}" if backend.payload_bytes is not None else ""
        case = _case(suite, command, name, f"all-reduce {backend.backend}{payload}")
        if backend.verdict == "fail" or (backend.required and backend.state != "measured"):
            figure = text.measured(backend.busbw_gb_per_s, backend.latency_us) or backend.state
            _add(case, "failure", "all-reduce", backend.reason or figure, figure)
        elif backend.state != "measured":
            _add(case, "skipped", None, f"{backend.state}: {backend.reason or 'no reason given'}")
    suite.set("tests", str(len(suite)))
    for tag, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    return suite


def _case(suite: ET.Element, command: str, host: str, name: str, seconds: float = 0.0) -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=_clean(f"bringup.{command}.{host}"), name=_clean(name), time=f"{seconds:.3f}"
    )


def _host_case(case: ET.Element, host: HostResult) -> None:
    if host.status == "ok":
        return
    worst = host.worst_finding
    why = host.why or (worst.cause if worst else "") or host.status
    _add(case, "error" if host.status == "unknown" else "failure", host.status, why)


def _add(case: ET.Element, tag: str, type_: str | None, message: str, told: str | None = None) -> None:
    element = ET.SubElement(case, tag, message=_clean(message))
    if type_ is not None:
        element.set("type", _clean(type_))
    element.text = _clean(told) if told else None


def _clean(value: str) -> str:
    return _NOT_XML.sub("\ufffd", text.printable(value))
