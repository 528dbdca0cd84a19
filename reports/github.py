"""Workflow commands that a hosted runner turns into annotations on the changed lines."""

from auditor.model import Failure, Finding, Run, Severity, Span
from reports._text import safe

_COMMAND = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render(run: Run, *, color: bool, width: int) -> str:
    """One command a finding, and one for each file that could not be analysed."""
    lines = [_finding(finding) for finding in run.findings] + [_failure(failure) for failure in run.failures]
    return "".join(f"{line}\n" for line in lines)


def _finding(finding: Finding) -> str:
    steps = [f"{n}. {step.path}:{step.line}: {step.note}" for n, step in enumerate(finding.trace, 1)]
    properties = {**_place(finding.span), "title": f"poolaudit {finding.code} {finding.name}"}
    return _command(_COMMAND[finding.severity], properties, [finding.message, *steps])


def _failure(failure: Failure) -> str:
    properties: dict[str, object] = {"file": failure.path}
    if failure.line:
        properties["line"] = failure.line
    properties["title"] = "poolaudit: not analysed"
    return _command("error", properties, [failure.message])


def _place(span: Span) -> dict[str, object]:
    """Columns only on one line: the annotation interface refuses them on a range of lines."""
    place: dict[str, object] = {"file": span.path, "line": span.line, "endLine": span.end_line}
    if span.line == span.end_line:
        place |= {"col": span.column, "endColumn": span.end_column}
    return place


def _command(name: str, properties: dict[str, object], lines: list[str]) -> str:
    """Each line is made harmless by itself; the breaks between them survive as %0A."""
    pairs = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{name} {pairs}::" + "%0A".join(_data(line) for line in lines)


def _data(text: str) -> str:
    """`%` first, or it would escape the escapes; line breaks stay breaks, other controls become visible."""
    encoded = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return safe(encoded)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
