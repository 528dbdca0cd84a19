"""JUnit XML: findings as failed test cases, for build servers that know nothing else."""

from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from auditor.model import Failure, Finding, Run, Severity
from reports._text import safe


def render(run: Run, *, color: bool, width: int) -> str:
    """One suite. Errors and warnings fail, infos are skipped; without any, one case says so by passing."""
    suite = Element("testsuite", name="poolaudit", time=f"{run.summary.seconds:.3f}")
    for finding in run.findings:
        _finding(suite, finding)
    for failure in run.failures:
        _failure(suite, failure)
    if len(suite) == 0:
        SubElement(suite, "testcase", classname="poolaudit", name="nothing found")
    counts = {
        "tests": len(suite),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    suites = Element("testsuites", name="poolaudit", time=suite.attrib["time"])
    for key, count in counts.items():
        suite.set(key, str(count))
        suites.set(key, str(count))
    suites.append(suite)
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _finding(suite: Element, finding: Finding) -> None:
    span = finding.span
    where = f"{span.path}:{span.line}:{span.column}"
    name = f"{finding.code} {finding.name} {where}" + (f" in {finding.symbol}" if finding.symbol else "")
    case = _case(suite, span.path, name, span.line)
    verdict = "skipped" if finding.severity is Severity.INFO else "failure"
    told = SubElement(case, verdict, message=safe(finding.message))
    if verdict == "failure":
        told.set("type", finding.code)
    steps = [f"{n}. {step.path}:{step.line}: {step.note}" for n, step in enumerate(finding.trace, 1)]
    told.text = "\n".join(safe(line) for line in [f"{where}: {finding.message}", *steps])


def _failure(suite: Element, failure: Failure) -> None:
    case = _case(suite, failure.path, f"not analysed {failure.path}", max(failure.line, 1))
    SubElement(case, "error", type="not-analysed", message=safe(failure.message))


def _case(suite: Element, path: str, name: str, line: int) -> Element:
    """`safe` leaves nothing that XML cannot hold: controls and surrogates are visible characters by then."""
    shown = safe(path)
    return SubElement(suite, "testcase", classname=shown, name=safe(name), file=shown, line=str(line))
