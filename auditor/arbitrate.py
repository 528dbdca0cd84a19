"""One acquire, one verdict: of several balance findings at one place the most telling is kept."""

from collections.abc import Iterable

from auditor.model import Finding, Span

ORDER = ("104", "105", "109", "101", "102", "107", "106", "108", "110", "111", "103")
_RANK = {f"PA{number}": rank for rank, number in enumerate(ORDER)}


def arbitrate(findings: Iterable[Finding]) -> list[Finding]:
    """`findings` with at most one PA1 a span, the first in ORDER; all others once."""
    best: dict[Span, Finding] = {}
    others: dict[Finding, None] = {}
    for finding in findings:
        if finding.code not in _RANK:
            others[finding] = None
            continue
        known = best.get(finding.span)
        if known is None or _RANK[finding.code] < _RANK[known.code]:
            best[finding.span] = finding
    return sorted([*best.values(), *others], key=by_place)


def ranks_below(code: str, other: str) -> bool:
    """Whether `other`, found at the same acquire, keeps `code` from being shown."""
    return code in _RANK and other in _RANK and _RANK[code] > _RANK[other]


def by_place(finding: Finding) -> tuple[str, int, int, str, str]:
    """The order in which findings are reported: path, line, column, code."""
    span = finding.span
    return span.path, span.line, span.column, finding.code, finding.message
