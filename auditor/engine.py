"""The pipeline: from arguments to a finished run. Read it as a table of contents."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from auditor import __version__
from auditor.cache import Cache, fingerprint, tool_digest
from auditor.config import AnalysisSettings, Settings
from auditor.facts import Facts
from auditor.judge import judge
from auditor.model import Failure, Finding, Run, Summary
from auditor.project.analysis import FlowResult, analyse
from auditor.scanning import Progress, Scan, content_digests, no_progress, scan_all
from auditor.selection import Selection
from auditor.source.discover import Discovered, discover
from auditor.texts import Texts


@dataclass(frozen=True, slots=True)
class Request:
    """What to audit and how; nothing here decides what a report looks like."""

    paths: tuple[str, ...]
    settings: Settings
    root: Path
    jobs: int = 1
    cache_dir: Path | None = None
    progress: Progress = no_progress
    keep: Callable[[Sequence[Finding]], Sequence[Finding]] = (
        list  # what a baseline or --diff-base lets through
    )


@dataclass(frozen=True, slots=True)
class Audited:
    """A finished run, the selected findings before `keep`, and what was wrong with the cache."""

    run: Run
    selected: tuple[Finding, ...]
    warning: str | None


def audit(request: Request) -> Audited:
    """Audit `request.paths`."""
    started = time.perf_counter()
    selection = Selection(request.settings, request.root)
    found = discover(request.paths, root=os.fspath(request.root), exclude=request.settings.exclude)
    texts = Texts(found.files)
    cache = Cache(request.cache_dir, [os.fspath(Path.cwd()), sorted(request.paths)])
    run = _all_found(request, found, texts, cache)
    selected = tuple(finding for finding in run.findings if selection.keeps(finding))
    kept = tuple(request.keep(selected))
    counts = dict(sorted(Counter(finding.code for finding in kept).items()))
    summary = replace(run.summary, findings=counts, seconds=round(time.perf_counter() - started, 3))
    return Audited(replace(run, findings=kept, summary=summary), selected, cache.warning)


def _all_found(request: Request, found: Discovered, texts: Texts, cache: Cache) -> Run:
    """Everything that any rule found, from the cache where no file has changed."""
    tool = tool_digest(request.settings.analysis)
    known = content_digests(texts) if cache.has("run") else {}
    if known and (run := cache.get("run", _key(tool, found, known), Run)):
        return run
    scan = scan_all(texts, known, cache, tool, request.jobs, request.progress)
    flow = _flow(scan, texts, cache, tool, request.settings.analysis)
    failures = _in_order([*found.failures, *scan.failures, *flow.failures])
    failed = {failure.path for failure in failures}
    facts = Facts(leases=flow.leases, files=scan.indexes)
    comments = [comment for comment in scan.suppressions if comment.span.path not in failed]
    findings, excerpts = judge(facts, comments, texts)
    run = Run(
        version=__version__,
        summary=_summary(found, scan, flow, failures),
        findings=tuple(findings),
        failures=failures,
        unfollowed=_in_order(flow.unfollowed),
        excerpts=excerpts,
    )
    cache.put("run", _key(tool, found, scan.digests), run)
    return run


def _key(tool: str, found: Discovered, digests: dict[str, str]) -> str:
    return fingerprint(tool, found.failures, sorted(digests.items()))


def _flow(scan: Scan, texts: Texts, cache: Cache, tool: str, settings: AnalysisSettings) -> FlowResult:
    """The flow analysis of the files that mention what it knows, from the cache if none has changed."""
    digests = scan.digests
    key = fingerprint(tool, [(path, digests[path]) for path in scan.relevant])
    if known := cache.get("flow", key, FlowResult):
        return known
    flow = analyse({path: texts.text(path) for path in scan.relevant}, settings)
    cache.put("flow", key, flow)
    return flow


def _summary(found: Discovered, scan: Scan, flow: FlowResult, failures: Sequence[Failure]) -> Summary:
    return Summary(
        files=len(found.files),
        lines=sum(index.lines for index in scan.indexes),
        files_failed=len({failure.path for failure in failures}),
        acquires=flow.acquires,
        followed=flow.followed,
        not_followed=flow.acquires - flow.followed,
        protocols=flow.protocols,
        acquire_names=flow.acquire_names,
        release_names=flow.release_names,
    )


def _in_order(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(set(failures), key=lambda failure: (failure.path, failure.line, failure.message)))
