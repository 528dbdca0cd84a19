"""What a person is told beside the findings, on standard error: what was met, and the verdict."""

from collections import Counter
from collections.abc import Iterator

from auditor.model import Failure, Run, Safety, Severity
from reports._adoption import SUPPORT, adoption_rows
from reports._paint import SEVERITY_STYLE, STRONG, Row, paint
from reports._rows import MOST, TITLE, count, listed, titled
from reports._text import wrap

_NOUN = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "info finding"}


def summary(run: Run, *, color: bool, width: int, statistics: bool) -> str:
    """Everything but the findings themselves; the verdict comes last, where the eye is when the run ends."""
    rows: list[Row] = [[]] if run.findings else []
    if statistics:
        rows += adoption_rows(run, width)
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
        yield from titled("Pools", ["no acquire recognised"], width)
        return
    lost = f", {total.not_followed} not (--verbose says why)" if total.not_followed else ""
    lines = [f"{count(total.acquires, 'acquire')}, {total.followed} followed to the end{lost}"]
    for use in sorted(total.protocols, key=lambda use: -use.acquires)[:MOST]:
        counts = f"{count(use.acquires, 'acquire')}, {count(use.releases, 'release')}"
        lines.append(f"{use.name} ({use.origin}): {counts}")
    if len(total.protocols) > MOST:
        lines.append(f"and {len(total.protocols) - MOST} more protocols")
    yield from titled("Pools", lines, width)


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
        kinds = ", ".join(f"{support[kind]} {kind}" for kind in reversed(SUPPORT))
        lines.append(f"support by class: {kinds}")
    if total.acquire_names:
        lines.append(f"acquired by {listed(total.acquire_names)}")
    if total.release_names:
        lines.append(f"released by {listed(total.release_names)}")
    yield from titled("Adoption", lines, width)


def _rules(run: Run) -> Iterator[Row]:
    """Findings by rule, the most frequent first."""
    kinds = {finding.code: finding for finding in run.findings}
    title = "Findings"
    for code, number in sorted(run.summary.findings.items(), key=lambda item: (-item[1], item[0])):
        finding = kinds.get(code)
        name, style = (finding.name, SEVERITY_STYLE[finding.severity]) if finding else ("", "")
        yield [(f"{title:<{TITLE}}", STRONG), (f"{number:>4} ", ""), (code, style), (f" {name}", "")]
        title = ""


def _verdict(run: Run, width: int) -> Iterator[Row]:
    total = run.summary
    if not total.files and not run.failures:
        for line in wrap("Nothing was audited: no Python file there, or all are excluded.", width, hanging=2):
            yield [(line, "yellow")]
        return
    scope = f"{count(total.files, 'file')}, {count(total.lines, 'line')} in {total.seconds:.2f} s"
    severities = Counter(finding.severity for finding in run.findings)
    counts = ", ".join(count(severities[kind], _NOUN[kind]) for kind in Severity if severities[kind])
    parts = [f"Found {counts}" if counts else "Nothing found", scope]
    if run.failures:
        parts.insert(1, f"{count(len(run.failures), 'failure')} to analyse")
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
