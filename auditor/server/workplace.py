"""One audited folder as an editor sees it: files on disk, and over them the text of open documents."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from auditor.arbitrate import by_place
from auditor.baseline import BaselineError, read_baseline, unknown
from auditor.cache import DIRECTORY, Cache, tool_digest
from auditor.config import AnalysisSettings
from auditor.engine import Request, remembered_or_new, without_collecting
from auditor.examine import Order as Examination
from auditor.examine import examine
from auditor.model import Failure, Finding, Run
from auditor.progress import no_progress
from auditor.selection import Selection
from auditor.server.documents import as_bytes, is_saved, placed_over, syntax_error
from auditor.server.incremental import Incremental
from auditor.server.memory import Glimpse, Memory
from auditor.server.recurring import Watch
from auditor.settings_file import Effective, SettingsError, effective
from auditor.source.discover import Discovered, NoSuchPath, discover
from auditor.source.load import digest
from auditor.source.scan import Scanned
from auditor.texts import Texts

WORTH_A_GLANCE = 0.25
"""Seconds of processor time; where a whole audit takes less, it answers every keystroke."""

WRONG = (SettingsError, BaselineError, NoSuchPath)


@dataclass(frozen=True, slots=True)
class Order:
    """`paths` are to be audited with the settings found from `start`; `documents` maps locations to text."""

    start: str
    paths: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)
    glance: bool = False  # whether a first answer about the edited documents will do
    number: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, with absolute paths. `wrong` says what kept us from auditing at all.

    One that is not `settled` is a first answer, which a whole audit should follow; an `outdated` one says
    nothing.
    """

    findings: tuple[Finding, ...] = ()
    failures: tuple[Failure, ...] = ()
    wrong: str = ""
    settled: bool = True
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Audited:
    """What the last whole audit read."""

    settings: AnalysisSettings
    tool: str
    found: Discovered
    texts: Texts
    digests: Mapping[str, str]
    opened: frozenset[str]  # locations of the documents whose text went before the file's
    run: Run


class Workplace:
    """Audits one folder again and again; what has not changed is not looked at twice."""

    def __init__(self, start: str, paths: tuple[str, ...], jobs: int, watch: Watch = lambda: None) -> None:
        self.start = Path(start)
        self.paths = paths
        self.jobs = jobs
        self._watch = watch
        self._flow = Incremental(watch)
        self._memory: Memory | None = None
        self._last: Audited | None = None
        self._seconds = 0.0  # of the processor, for the last audit that was no memory
        self._parsed: dict[str, bytes] = {}  # of each open document, the last text without a syntax error

    def check(self, documents: Mapping[str, str], *, glance: bool = False) -> Answer:
        """Audit with these documents over their files; at a `glance`, if one is allowed and quicker."""
        try:
            settings = effective(self.start)
            selection = Selection(settings.settings, settings.root)
            last = self._last if glance and self._seconds > WORTH_A_GLANCE else None
            if last is not None and not last.opened <= documents.keys():
                last = None  # one was closed since: its file counts again, and was not read
            if last is not None and self._flow.fits(settings.settings.analysis):
                run, broken = self._glance(last, documents)
            else:
                last = None
                run, broken = self._run(settings, documents)
            kept = self._unknown(settings, [f for f in run.findings if selection.keeps(f)])
        except WRONG as error:
            return Answer(wrong=str(error))
        failures = {failure.path: failure for failure in (*run.failures, *broken)}
        return Answer(
            tuple(_absolute(finding) for finding in kept),
            tuple(replace(failure, path=_location(failure.path)) for failure in failures.values()),
            settled=last is None,
        )

    def rest(self) -> None:
        """What is better done while nobody waits: learn what a glance builds on, drop what is not needed."""
        last = self._last
        if last is not None and not self._flow.fits(last.settings) and self._memory is not None:
            began = time.process_time()
            scanned = self._memory.get("scan", last.tool, dict[str, Scanned]) or {}
            relevant = sorted(path for path, file in scanned.items() if file.relevant)
            with without_collecting():
                self._flow.whole(last.texts.readable(last.digests), last.settings, relevant)
            self._seconds = time.process_time() - began

    def _run(self, settings: Effective, documents: Mapping[str, str]) -> tuple[Run, list[Failure]]:
        """What `poolaudit audit` would say if all documents were saved."""
        request = Request(
            self.paths,
            settings.settings,
            settings.root,
            jobs=self.jobs,
            progress=lambda *_: self._watch(),
            analyse=self._flow.whole,
        )
        found = discover(self.paths, root=os.fspath(settings.root), exclude=settings.settings.exclude)
        found, placed = placed_over(found, documents, self.paths)
        self._parsed = {path: data for path, data in self._parsed.items() if path in placed}
        data, broken = self._sound(placed)
        memory = self._memory_of(settings)
        data = {path: text for path, text in data.items() if not is_saved(found, path, text)}
        memory.saved = not data
        texts, began = Texts(found.files).changed(data), time.process_time()
        basis = self._flow.basis
        run, digests = remembered_or_new(request, found, texts, memory)
        if self._flow.basis is not basis:
            self._seconds = time.process_time() - began
        analysed, opened = settings.settings.analysis, frozenset(documents)
        self._last = Audited(analysed, tool_digest(analysed), found, texts, digests, opened, run)
        return run, broken

    def _glance(self, last: Audited, documents: Mapping[str, str]) -> tuple[Run, list[Failure]]:
        """The files as the last whole audit read them, and over them the documents."""
        assert self._memory is not None
        found, placed = placed_over(last.found, documents, self.paths)
        data, broken = self._sound(placed)
        texts = Texts(found.files).changed(data)
        digests = {**last.digests, **{path: digest(text) for path, text in data.items()}}
        order = Examination(
            found,
            texts,
            digests,
            last.settings,
            last.tool,
            self.jobs,
            no_progress,
            analyse=self._flow.glance(placed),
            repair_in=frozenset(placed),
        )
        with without_collecting():
            run = examine(order, Glimpse(self._memory)).run
        elsewhere = [each for each in last.run.findings if each.span.path not in placed]
        here = [each for each in run.findings if each.span.path in placed]
        return replace(run, findings=tuple(sorted([*elsewhere, *here], key=by_place))), broken

    def _memory_of(self, settings: Effective) -> Memory:
        if self._memory is None:
            arguments = [os.fspath(Path.cwd()), sorted(self.paths)]
            self._memory = Memory(Cache(settings.root / DIRECTORY, arguments))
        return self._memory

    def _sound(self, placed: Mapping[str, str]) -> tuple[dict[str, bytes], list[Failure]]:
        """The bytes to audit: while a document cannot be parsed, those of its last text that could."""
        data, broken = {}, []
        for path, text in placed.items():
            data[path] = as_bytes(text)
            error = syntax_error(text)
            if error is None:
                self._parsed[path] = data[path]
            elif path in self._parsed:
                data[path] = self._parsed[path]
                broken.append(Failure(path, error.lineno or 1, f"invalid syntax: {error.msg}"))
        return data, broken

    def _unknown(self, settings: Effective, findings: list[Finding]) -> Sequence[Finding]:
        baseline = settings.settings.baseline
        return unknown(findings, read_baseline(settings.root / baseline)) if baseline else findings


def _absolute(finding: Finding) -> Finding:
    """With locations for paths, in all that an editor shows or edits."""
    fix = finding.fix
    if fix is not None:
        edits = (replace(e, span=replace(e.span, path=_location(e.span.path))) for e in fix.edits)
        fix = replace(fix, edits=tuple(edits))
    return replace(
        finding,
        span=replace(finding.span, path=_location(finding.span.path)),
        trace=tuple(replace(step, path=_location(step.path)) for step in finding.trace),
        fix=fix,
    )


def _location(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - resolves `..`, links stay
