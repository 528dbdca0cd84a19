"""One line a finding: for editors, grep and diff."""

from auditor.model import Finding, Run
from reports._paint import SEVERITY_STYLE, STRONG, Row, paint
from reports._text import safe


def render(run: Run, *, color: bool, width: int) -> str:
    """Never wrapped, whatever `width`: a line is a record."""
    return paint((_row(finding) for finding in run.findings), color=color)


def _row(finding: Finding) -> Row:
    span, style = finding.span, SEVERITY_STYLE[finding.severity]
    return [
        (f"{safe(span.path)}:{span.line}:{span.column}:", STRONG),
        (" ", ""),
        (finding.code, style),
        (f" {finding.name} ", ""),
        (f"[{finding.severity}]", style),
        (f" {safe(finding.message)}", ""),
    ]
