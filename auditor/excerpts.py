"""The source text that findings need: lines to show, and what a fingerprint is made of."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from auditor.model import Finding, Span

CONTEXT = 2
LinesOf = Callable[[str], Sequence[str]]
"""The lines of the file that reports call by this path; empty where it cannot be read any more."""


def excerpts(findings: Iterable[Finding], lines_of: LinesOf) -> dict[str, dict[int, str]]:
    """Every line that a finding or its trace names, with CONTEXT lines around it, and those that its fix
    edits: path -> line -> text."""
    wanted: dict[str, set[int]] = defaultdict(set)
    for finding in findings:
        span = finding.span
        places = [(span.path, span.line), (span.path, span.end_line)]
        for path, line in places + [(step.path, step.line) for step in finding.trace]:
            wanted[path].update(range(line - CONTEXT, line + CONTEXT + 1))
        for edit in finding.fix.edits if finding.fix else ():
            wanted[edit.span.path].update(range(edit.span.line, edit.span.end_line + 1))
    return {path: _numbered(lines_of(path), wanted[path]) for path in sorted(wanted)}


def _numbered(lines: Sequence[str], numbers: Iterable[int]) -> dict[int, str]:
    return {number: lines[number - 1] for number in sorted(numbers) if 1 <= number <= len(lines)}


def text_at(span: Span, lines: Sequence[str]) -> str:
    """The source text of `span`, its lines as they are."""
    covered = list(lines[span.line - 1 : span.end_line])
    if not covered:
        return ""
    covered[-1] = covered[-1][: max(span.end_column - 1, 0)]
    covered[0] = covered[0][span.column - 1 :]
    return "\n".join(line.rstrip("\r\n") for line in covered)
