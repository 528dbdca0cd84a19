"""What a person is told beside the findings, on standard error: what was met, and the verdict."""

from collections import Counter
from collections.abc import Iterator

from auditor.model import ClassRow, Failure, Run, Safety, Severity
from reports._paint import QUIET, SEVERITY_STYLE, STRONG, Row, paint
from reports._text import safe, wrap

_TITLE = 12  # cells of the left column
_MOST = 12  # names or protocols on show; json has them all
_SUPPORT = ("none", "partial", "full")
_PRIORITY = ("high", "medium", "low", None)
_NOUN = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info finding"}
_SUPPORT_STYLE = {"none": "red", "partial": "yellow", "full": "green"}


def summary(run: Run, *, color: bool, width: int, statistics: bool) -> str:
    """Everything but the findings themselves; the verdict comes last, where the eye is when the run ends."""
    rows: list[Row] = [[]] if run.findings else []
    if statistics:
        rows += _classes(run.classes, width)
    rows += [*_pools(run, width), *_adoption(run, width), *_rules(run), *_failures(run.failures, width)]
    rows += _verdict(run, width)
    return paint(rows, color=color)


def failures(run: Run, *, color: bool, width: int) -> str:
    """The files that could not be analysed, for when nothing else is said: they are always named."""
    return paint(_failures(run.failures, width), color=color)


def unfollowed(run: Run, *, color: bool, width: int) -> str:
    """The acquires whose life was not decided, and why: what --verbose adds."""
    return paint(_places("Not followed", run.unfollowed, width), color=color)


def _pools(run: Run, width: int) -> Iterator[Row]:
    total = run.summary
    if not total.acquires:
        yield from _titled("Pools", ["no acquire recognised"], width)
        return
    lost = f", {total.not_followed} not (--verbose says why)" if total.not_followed else ""
    lines = [f"{_count(total.acquires, 'acquire')}, {total.followed} followed to the end{lost}"]
    for use in sorted(total.protocols, key=lambda use: -use.acquires)[:_MOST]:
        counts = f"{_count(use.acquires, 'acquire')}, {_count(use.releases, 'release')}"
        lines.append(f"{use.name} ({use.origin}): {counts}")
    if len(total.protocols) > _MOST:
        lines.append(f"and {len(total.protocols) - _MOST} more protocols")
    yield from _titled("Pools", lines, width)


def _adoption(run: Run, width: int) -> Iterator[Row]:
    total = run.summary
    lines = [
        f"files that import a pool: {total.files_importing_pool}, that use one: {total.files_using_pool}"
    ]
    if total.classes_with_pool_switch:
        defaults = f"{total.switch_default_on} on by default, {total.switch_default_off} off"
        lines.append(f"classes with a switch: {total.classes_with_pool_switch} ({defaults})")
    support = Counter(row.support for row in run.classes)
    if run.classes:
        kinds = ", ".join(f"{support[kind]} {kind}" for kind in reversed(_SUPPORT))
        lines.append(f"support by class: {kinds}")
    if total.acquire_names:
        lines.append(f"acquired by {_names(total.acquire_names)}")
    if total.release_names:
        lines.append(f"released by {_names(total.release_names)}")
    yield from _titled("Adoption", lines, width)


def _rules(run: Run) -> Iterator[Row]:
    """Findings by rule, the most frequent first."""
    kinds = {finding.code: finding for finding in run.findings}
    title = "Findings"
    for code, count in sorted(run.summary.findings.items(), key=lambda item: (-item[1], item[0])):
        finding = kinds.get(code)
        name, style = (finding.name, SEVERITY_STYLE[finding.severity]) if finding else ("", "")
        yield [(f"{title:<{_TITLE}}", STRONG), (f"{count:>4} ", ""), (code, style), (f" {name}", "")]
        title = ""


def _verdict(run: Run, width: int) -> Iterator[Row]:
    total = run.summary
    scope = f"{_count(total.files, 'file')}, {_count(total.lines, 'line')} in {total.seconds:.2f} s"
    severities = Counter(finding.severity for finding in run.findings)
    counts = ", ".join(_count(severities[kind], _NOUN[kind]) for kind in Severity if severities[kind])
    parts = [f"Found {counts}" if counts else "Nothing found", scope]
    if run.failures:
        parts.insert(1, f"{_count(len(run.failures), 'failure')} to analyse")
    safe_fixes = sum(
        finding.fix is not None and finding.fix.safety is Safety.SAFE for finding in run.findings
    )
    if safe_fixes:
        parts.append(f"{safe_fixes} with a safe fix (poolaudit fix)")
    worst = next((kind for kind in Severity if severities[kind]), None)
    style = SEVERITY_STYLE[worst] if worst else "yellow" if run.failures else "bold green"
    for line in wrap("; ".join(parts) + ".", width, hanging=2):
        yield [(line, style)]


def _failures(found: tuple[Failure, ...], width: int) -> Iterator[Row]:
    return _places("Not analysed", found, width)


def _places(title: str, found: tuple[Failure, ...], width: int) -> Iterator[Row]:
    if not found:
        return
    yield [(f"{title}:", STRONG)]
    for failure in found:
        place = f"{failure.path}:{failure.line}" if failure.line else failure.path
        for line in wrap(f"{place}: {failure.message}", width, first=2, hanging=6):
            yield [(line, "")]


def _classes(classes: tuple[ClassRow, ...], width: int) -> Iterator[Row]:
    """Least supported and most urgent first: the order in which one would work through them."""
    if not classes:
        return
    yield [("Support  Priority  Class", STRONG)]
    for row in sorted(classes, key=_urgency):
        style = _SUPPORT_STYLE.get(row.support, "")
        place = f"{safe(row.name)}  {safe(row.path)}:{row.line}"
        first, *rest = wrap(place, width - 21)
        yield [(f"{row.support:<9}", style), (f"{row.priority or '-':<10}", ""), (first, "")]
        yield from ([(" " * 21 + line, "")] for line in rest)
        for line in _why(row, width):
            yield [(line, QUIET)]
    yield []


def _urgency(row: ClassRow) -> tuple[int, int, str, int]:
    support = _SUPPORT.index(row.support) if row.support in _SUPPORT else len(_SUPPORT)
    priority = _PRIORITY.index(row.priority) if row.priority in _PRIORITY else len(_PRIORITY)
    return support, priority, row.path, row.line


def _why(row: ClassRow, width: int) -> list[str]:
    """What the class allocates on its forward path, and why that is large."""
    text = ": ".join(
        part for part in (row.estimated_bytes and f"{row.estimated_bytes} bytes", row.reason) if part
    )
    return wrap(text, width, first=19, hanging=19) if text else []


def _titled(title: str, lines: list[str], width: int) -> Iterator[Row]:
    for line in lines:
        for part in wrap(line, width - _TITLE, hanging=2):
            yield [(f"{title:<{_TITLE}}", STRONG), (part, "")]
            title = ""


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
