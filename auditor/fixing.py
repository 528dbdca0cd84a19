"""From a request to repaired files: audit, fix in passes that are each audited again, write."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from auditor.cache import Cache, tool_digest
from auditor.engine import Request, remembered_or_new, without_collecting
from auditor.examine import Order, examine
from auditor.fixes.document import Document
from auditor.fixes.repair import Choose, Repaired, Verdict, repair
from auditor.model import Finding, Run
from auditor.progress import no_progress
from auditor.selection import Selection
from auditor.source.discover import Discovered, SourceFile, discover
from auditor.source.load import Unreadable
from auditor.texts import Texts

Kind = TypeVar("Kind")
FEW = 40  # files that are scanned sooner than a second process is started
GIVEN_UP = "not followed: "  # unlike an acquire whose end somebody else decides
UNSELECTED = "not selected"


@dataclass(frozen=True, slots=True)
class Fixing:
    """What `fix` would do, nothing written yet. `run` is the audit before; `files` were analysed for it."""

    run: Run
    repaired: Repaired
    files: Mapping[str, SourceFile]
    before: Mapping[str, Document]


def plan_fixes(request: Request, choose: Choose) -> Fixing:
    """Audit and repair in memory. `choose` is asked about findings that are selected and not known."""
    found = discover(request.paths, root=os.fspath(request.root), exclude=request.settings.exclude)
    session = Session(request, found)
    run = session.first()
    selection = Selection(request.settings, request.root)
    kept = request.keep([finding for finding in run.findings if selection.keeps(finding)])
    functions = {(finding.span.path, finding.symbol) for finding in kept}

    def wanted(finding: Finding, documents: Mapping[str, Document]) -> str:
        among = (finding.span.path, finding.symbol) in functions
        return choose(finding, documents) if among and selection.keeps(finding) else UNSELECTED

    files = _Files(session, found)
    repaired = repair(_verdict(run), files, session.judge, wanted)
    left = tuple(each for each in repaired.left if each.reason != UNSELECTED)
    told = {(failure.path, failure.message) for failure in run.failures}  # a fix moves lines
    later = [each for each in repaired.failures if (each.path, each.message) not in told]
    run = replace(run, failures=(*run.failures, *later))
    return Fixing(run, replace(repaired, left=left), files.sources, files)


def _verdict(run: Run) -> Verdict:
    given_up = (each.path for each in run.unfollowed if each.message.startswith(GIVEN_UP))
    return Verdict(run.findings, Counter(given_up), run.failures)


class Session:
    """One audit and those after it, which look again only at what has changed."""

    def __init__(self, request: Request, found: Discovered) -> None:
        self._request, self._found = request, found
        self._tool = tool_digest(request.settings.analysis)
        arguments = [os.fspath(Path.cwd()), sorted(request.paths)]
        self._cache = Remembered(Cache(request.cache_dir, arguments))
        self.digests: dict[str, str] = {}
        self.texts = Texts(found.files)

    def first(self) -> Run:
        """The files as they are on the disk."""
        run, digests = remembered_or_new(self._request, self._found, self.texts, self._cache)
        self.digests = dict(digests)
        self._cache.keep_to_memory()
        return run

    def judge(self, documents: Mapping[str, Document]) -> Verdict:
        """The files with these in the place of what is on the disk."""
        texts = self.texts.changed({path: document.data for path, document in documents.items()})
        digests = self.digests | {path: document.digest for path, document in documents.items()}
        jobs = 1 if len(documents) <= FEW else self._request.jobs
        order = Order(
            self._found, texts, digests, self._request.settings.analysis, self._tool, jobs, no_progress
        )
        with without_collecting():
            return _verdict(examine(order, self._cache).run)


class Remembered(Cache):
    """Keeps answers for as long as the process lives; what it does not know it asks of `disk`."""

    def __init__(self, disk: Cache) -> None:
        self._disk: Cache | None = disk
        self._reading = disk
        self._kept: dict[str, tuple[str, object]] = {}
        self.warning = disk.warning

    def keep_to_memory(self) -> None:
        """From now on nothing is stored on the disk: what is examined is not what the files say."""
        self._disk = None

    def has(self, name: str) -> bool:
        return name in self._kept or self._reading.has(name)

    def get(self, name: str, key: str, kind: type[Kind]) -> Kind | None:
        kept_key, value = self._kept.get(name, ("", None))
        if value is not None:
            return value if kept_key == key and isinstance(value, _origin(kind)) else None
        return self._reading.get(name, key, kind)

    def put(self, name: str, key: str, value: object) -> None:
        self._kept[name] = (key, value)
        if self._disk is not None:
            self._disk.put(name, key, value)
            self.warning = self._disk.warning


def _origin(kind: type[Kind]) -> type[Kind]:
    """`dict` of `dict[str, int]`, which isinstance does not take."""
    return getattr(kind, "__origin__", kind)


class _Files(Mapping[str, Document]):
    """Every file as it was audited, read when asked for; one that has changed since is not there."""

    def __init__(self, session: Session, found: Discovered) -> None:
        self._session = session
        self.sources = {file.path: file for file in found.files}
        self._read: dict[str, Document] = {}

    def __getitem__(self, path: str) -> Document:
        if path not in self._read:
            try:
                document = Document(path, self._session.texts.data(self.sources[path]))
            except Unreadable as error:
                raise KeyError(path) from error
            if document.digest != self._session.digests.get(path):
                raise KeyError(path)
            self._read[path] = document
        return self._read[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)
