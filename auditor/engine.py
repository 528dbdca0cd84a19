"""From arguments to a finished run: what was found before, if no file has changed, else a new examination."""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.cache import Cache, fingerprint, tool_digest
from auditor.config import Settings
from auditor.model import Finding, RuleInfo, Run
from auditor.progress import Progress, no_progress
from auditor.rule import Rule, all_rules
from auditor.selection import Selection
from auditor.source.discover import Discovered, discover
from auditor.texts import Texts

if TYPE_CHECKING:
    from auditor.examine import Analyse


@dataclass(frozen=True, slots=True)
class Request:
    """What to audit and how; nothing here decides what a report looks like."""

    paths: tuple[str, ...]
    settings: Settings
    root: Path
    jobs: int = 1
    cache_dir: Path | None = None
    progress: Progress = no_progress
    keep: Callable[[Sequence[Finding]], Sequence[Finding]] = list  # what a baseline or --diff-base lets pass
    proofs: Path | None = None  # what leak tests said of earlier findings
    effort: bool = False  # whether `adopt` is asked how many edits it would make, for those who read them
    analyse: "Analyse | None" = None  # another flow analysis than that of the command line


@dataclass(frozen=True, slots=True)
class Audited:
    """A finished run, the selected findings before `keep`, and what was wrong with the cache."""

    run: Run
    selected: tuple[Finding, ...]
    warning: str | None


def audit(request: Request) -> Audited:
    """Audit `request.paths`. Every rule runs and selecting comes last: the cache serves any selection."""
    started = time.perf_counter()
    selection = Selection(request.settings, request.root)
    found = discover(request.paths, root=os.fspath(request.root), exclude=request.settings.exclude)
    cache = Cache(request.cache_dir, [os.fspath(Path.cwd()), sorted(request.paths)])
    run, _ = remembered_or_new(request, found, Texts(found.files), cache)
    selected = tuple(finding for finding in run.findings if selection.keeps(finding))
    kept = tuple(request.keep(selected))
    if request.proofs is not None and request.proofs.exists():
        from auditor.leaktests.proofs import with_proofs  # most trees have none

        kept = tuple(with_proofs(kept, request.proofs))
    counts = dict(sorted(Counter(finding.code for finding in kept).items()))
    summary = replace(run.summary, findings=counts, seconds=round(time.perf_counter() - started, 3))
    rules = tuple(_info(rule) for rule in all_rules())
    known = len(selected) - len(kept)
    shown = replace(run, findings=kept, summary=summary, rules=rules, known=known, paths=tuple(request.paths))
    return Audited(shown, selected, cache.warning)


def _info(rule: Rule) -> RuleInfo:
    meta = rule.meta
    return RuleInfo(meta.code, meta.name, meta.severity, meta.default, rule.page, rule.bad, rule.good)


def remembered_or_new(
    request: Request, found: Discovered, texts: Texts, cache: Cache
) -> tuple[Run, Mapping[str, str]]:
    """Everything that any rule finds, and the digests of the files that it was found in."""
    tool = tool_digest(request.settings.analysis) if cache.remembers else ""
    digests = texts.digests() if cache.has("scan") else {}
    name = "run-with-effort" if request.effort else "run"
    if digests and (run := cache.get(name, _key(tool, found, digests), Run)):
        return run, digests
    from auditor.examine import Order, examine  # which a remembered run does not need

    order = Order(
        found, texts, digests, request.settings.analysis, tool, request.jobs, request.progress,
        request.effort, request.analyse,
    )  # fmt: skip
    with without_collecting():
        examined = examine(order, cache)
    cache.put(name, _key(tool, found, examined.digests), examined.run)
    return examined.run, examined.digests


@contextmanager
def without_collecting(*, last: bool = False) -> Iterator[None]:
    """What an examination builds it keeps until its end: to look for garbage meanwhile finds next to none.

    `last` is for what a process does before it ends, which else looks through all of it twice more.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if last:
            gc.freeze()
        if collecting:
            gc.enable()


def _key(tool: str, found: Discovered, digests: dict[str, str]) -> str:
    return fingerprint(tool, found.failures, sorted(digests.items()))
