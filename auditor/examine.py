"""The pipeline: scan, follow leases, gather facts, judge. Read it as a table of contents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from auditor import __version__
from auditor.cache import Cache, fingerprint
from auditor.config import AnalysisSettings
from auditor.facts import Facts
from auditor.judge import judge
from auditor.model import ClassRow, Failure, Run, Summary
from auditor.progress import Progress
from auditor.project.adoption.adoption import Adoption, Followed, adoption
from auditor.project.result import FlowResult
from auditor.protocols.clues import clues
from auditor.protocols.load import in_force
from auditor.scanning import Scan, scan_all
from auditor.source.discover import Discovered
from auditor.source.scan import Scanned
from auditor.texts import Texts

Analyse = Callable[[Mapping[str, str], AnalysisSettings, Sequence[str]], FlowResult]
"""Follows the leases of some sources; what the editor server puts here remembers what it parsed."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be examined. `digests` are the files', as far as the cache made it worth looking."""

    found: Discovered
    texts: Texts
    digests: Mapping[str, str]
    settings: AnalysisSettings
    tool: str
    jobs: int
    progress: Progress
    effort: bool = False
    analyse: Analyse | None = None  # None is that of `project.analysis`
    repair_in: frozenset[str] | None = None  # where findings want their fix; everywhere, if not said


@dataclass(frozen=True, slots=True)
class Examined:
    """Everything that any rule finds, and the digests of the files as they were read for it."""

    run: Run
    digests: dict[str, str]


def examine(order: Order, cache: Cache) -> Examined:
    """Examine the files anew, but for what `cache` still knows of single files and of the flow analysis."""
    scan = _scan(order, cache)
    flow = _flow(order, scan, cache)
    adopted = _adoption(order, scan, flow)
    unread = {failure.path for failure in scan.failures}  # who follows a lease there could not read it either
    followed = (failure for failure in flow.failures if failure.path not in unread)
    failures = _in_order([*order.found.failures, *scan.failures, *followed])
    failed = {failure.path for failure in failures}
    comments = [comment for comment in scan.suppressions if comment.span.path not in failed]
    facts = Facts(
        leases=flow.leases,
        misuses=flow.misuses,
        files=scan.indexes,
        modules_without_pool=adopted.modules_without_pool,
        pooled=adopted.pooled,
        pool_has_threshold=adopted.pool_has_threshold,
        repeated_allocators=adopted.repeated_allocators,
        standard=adopted.standard,
    )
    judged = judge(facts, comments, order.texts, order.repair_in)
    run = Run(
        version=__version__,
        summary=_summary(order.found, scan, flow, adopted, failures),
        classes=_classes(order, scan, adopted),
        findings=judged.findings,
        failures=_in_order([*failures, *judged.broken_fixes]),
        unfollowed=_in_order(flow.unfollowed),
        conventions=adopted.conventions,
        excerpts=judged.excerpts,
    )
    return Examined(run, scan.digests)


def _scan(order: Order, cache: Cache) -> Scan:
    """Every file's scan, those of unchanged files from the cache."""
    remembered = (cache.get("scan", order.tool, dict[str, Scanned]) if order.digests else None) or {}
    earlier = {path: old for path, old in remembered.items() if order.digests.get(path) == old.digest}
    looked_for = clues(in_force(order.settings))
    follow = order.settings if order.analyse is None else None
    scan = scan_all(order.texts, earlier, looked_for, order.jobs, order.progress, follow)
    if scan.new or len(scan.files) != len(remembered):
        cache.put("scan", order.tool, {file.path: file for file in scan.files})
    return scan


def _flow(order: Order, scan: Scan, cache: Cache) -> FlowResult:
    """The flow analysis of the relevant files, from the cache if none of them has changed."""
    digests = scan.digests
    key = fingerprint(order.tool, [(path, digests[path]) for path in scan.relevant])
    if known := cache.get("flow", key, FlowResult):
        return known
    flow = scan.flow
    if flow is None:
        order.progress("Following leases", 0, len(scan.relevant))
        flow = _analyse(order)(order.texts.readable(scan.digests), order.settings, scan.relevant)
    cache.put("flow", key, flow)
    return flow


def _analyse(order: Order) -> Analyse:
    if order.analyse is not None:
        return order.analyse
    from auditor.project.analysis import (
        analyse,  # which takes long, and a worker or the cache may know its result
    )

    return analyse


def _adoption(order: Order, scan: Scan, flow: FlowResult) -> Adoption:
    """Who uses a pool, by the calls that the flow analysis recognised wherever it looked."""
    read = frozenset(scan.relevant) - {failure.path for failure in flow.failures}
    decided = Followed(read, flow.pool_calls, flow.leases)
    return adoption(scan.indexes, decided, order.settings.standard)


def _classes(order: Order, scan: Scan, adopted: Adoption) -> tuple[ClassRow, ...]:
    if not order.effort:
        return adopted.rows
    from auditor.adopt.effort import with_effort  # the codemod, which most audits do without

    return with_effort(adopted.rows, scan.indexes, order.texts)


def _summary(
    found: Discovered, scan: Scan, flow: FlowResult, adopted: Adoption, failures: Sequence[Failure]
) -> Summary:
    return Summary(
        files=len(found.files),
        lines=sum(index.lines for index in scan.indexes),
        files_failed=len({failure.path for failure in failures}),
        acquires=flow.acquires,
        followed=flow.followed,
        not_followed=flow.acquires - flow.followed,
        protocols=flow.protocols,
        files_importing_pool=adopted.files_importing_pool,
        files_using_pool=adopted.files_using_pool,
        classes_with_pool_switch=adopted.classes_with_pool_switch,
        switch_default_on=adopted.switch_default_on,
        switch_default_off=adopted.switch_default_off,
        acquire_names=flow.acquire_names,
        release_names=flow.release_names,
    )


def _in_order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(set(failures), key=lambda failure: (failure.path, failure.line, failure.message)))
