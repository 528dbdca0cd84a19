"""One audited folder as an editor sees it: files on disk, and over them the text of open documents."""

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from auditor.baseline import BaselineError, read_baseline, unknown
from auditor.cache import DIRECTORY, Cache
from auditor.engine import Request, remembered_or_new
from auditor.model import Failure, Finding, Run
from auditor.selection import Selection
from auditor.server.memory import Memory
from auditor.settings_file import Effective, SettingsError, effective
from auditor.source.discover import Discovered, NoSuchPath, SourceFile, discover, shown
from auditor.source.load import Unreadable, encoding_of
from auditor.source.newer_syntax import in_older_syntax
from auditor.texts import Texts

WRONG = (SettingsError, BaselineError, NoSuchPath)


@dataclass(frozen=True, slots=True)
class Order:
    """`paths` are to be audited with the settings found from `start`; `documents` maps locations to text."""

    start: str
    paths: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, with absolute paths. `wrong` says what kept us from auditing at all."""

    findings: tuple[Finding, ...] = ()
    failures: tuple[Failure, ...] = ()
    wrong: str = ""


class Workplace:
    """Audits one folder again and again; what has not changed is not looked at twice."""

    def __init__(self, start: str, paths: tuple[str, ...], jobs: int) -> None:
        self.start = Path(start)
        self.paths = paths
        self.jobs = jobs
        self._memory: Memory | None = None
        self._parsed: dict[str, bytes] = {}  # of each open document, the last text without a syntax error

    def check(self, documents: Mapping[str, str]) -> Answer:
        """Audit with these documents over their files."""
        try:
            settings = effective(self.start)
            selection = Selection(settings.settings, settings.root)
            run, broken = self._run(settings, documents)
            kept = self._unknown(settings, [f for f in run.findings if selection.keeps(f)])
        except WRONG as error:
            return Answer(wrong=str(error))
        failures = {failure.path: failure for failure in (*run.failures, *broken)}
        return Answer(
            tuple(_absolute(finding) for finding in kept),
            tuple(replace(failure, path=_location(failure.path)) for failure in failures.values()),
        )

    def _run(self, settings: Effective, documents: Mapping[str, str]) -> tuple[Run, list[Failure]]:
        request = Request(self.paths, settings.settings, settings.root, jobs=self.jobs)
        found = discover(self.paths, root=os.fspath(settings.root), exclude=settings.settings.exclude)
        found, placed = _placed(found, documents, self.paths)
        self._parsed = {path: data for path, data in self._parsed.items() if path in placed}
        data, broken = self._sound(placed)
        memory = self._memory_of(settings)
        data = {path: text for path, text in data.items() if not _is_saved(found, path, text)}
        memory.saved = not data
        run, _ = remembered_or_new(request, found, Texts(found.files).changed(data), memory)
        return run, broken

    def _memory_of(self, settings: Effective) -> Memory:
        if self._memory is None:
            arguments = [os.fspath(Path.cwd()), sorted(self.paths)]
            self._memory = Memory(Cache(settings.root / DIRECTORY, arguments))
        return self._memory

    def _sound(self, placed: Mapping[str, str]) -> tuple[dict[str, bytes], list[Failure]]:
        """The bytes to audit: while a document cannot be parsed, those of its last text that could."""
        data, broken = {}, []
        for path, text in placed.items():
            data[path] = _bytes(text)
            error = _syntax_error(text)
            if error is None:
                self._parsed[path] = data[path]
            elif path in self._parsed:
                data[path] = self._parsed[path]
                broken.append(Failure(path, error.lineno or 1, f"invalid syntax: {error.msg}"))
        return data, broken

    def _unknown(self, settings: Effective, findings: list[Finding]) -> Sequence[Finding]:
        baseline = settings.settings.baseline
        return unknown(findings, read_baseline(settings.root / baseline)) if baseline else findings


def _placed(
    found: Discovered, documents: Mapping[str, str], paths: Sequence[str]
) -> tuple[Discovered, dict[str, str]]:
    """The documents by the paths that reports show. A new file is audited before it is saved, an excluded
    one never."""
    by_location = {file.location: file.path for file in found.files}
    placed, new = {}, []
    for location, text in documents.items():
        path = by_location.get(location) or by_location.get(os.path.realpath(location))
        if path is None and not Path(location).exists() and _below(location, paths):
            path = shown(location)
            new.append(SourceFile(path, location))
        if path is not None:
            placed[path] = text
    files = tuple(sorted((*found.files, *new))) if new else found.files
    return replace(found, files=files), placed


def _below(location: str, paths: Sequence[str]) -> bool:
    return any(Path(path) in (Path(location), *Path(location).parents) for path in paths)


def _is_saved(found: Discovered, path: str, data: bytes) -> bool:
    location = next(file.location for file in found.files if file.path == path)
    try:
        return Path(location).read_bytes() == data
    except OSError:
        return False


def _bytes(text: str) -> bytes:
    """As the file would be saved: in the encoding that its first lines declare."""
    plain = text.encode("utf-8", "surrogatepass")
    try:
        return text.encode(encoding_of(plain))
    except (Unreadable, UnicodeError, LookupError):
        return plain  # reading it names what is wrong


def _syntax_error(text: str) -> SyntaxError | None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return error if in_older_syntax(text) is None else None
    except (ValueError, RecursionError, MemoryError):
        return None  # the audit says it
    return None


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
