"""What a worker process does with one file: read, decode, index, find suppressions, judge its relevance."""

import symtable
import sys
import tokenize
import warnings
from dataclasses import dataclass

import msgspec

from auditor.model import Failure
from auditor.source.clue import Clue, is_relevant
from auditor.source.discover import SourceFile
from auditor.source.index import FileIndex, Need, index_file, prefilter
from auditor.source.lifetime.read import suspects
from auditor.source.load import Unreadable, decode, digest, read
from auditor.source.newer_syntax import in_older_syntax
from auditor.source.searched import Searched
from auditor.source.suppress import Suppression, suppressions

_NOT_PYTHON = f"not valid Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Scanned:
    """One file as its worker saw it. `relevant` is whether the flow analysis must read it too."""

    path: str
    digest: str
    index: FileIndex | None = None
    suppressions: tuple[Suppression, ...] = ()
    relevant: bool = False
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ScanJob:
    """A file to scan and the clues that make it relevant, if that is not known yet; `data` where its bytes
    are at hand (stdin)."""

    file: SourceFile
    clues: tuple[Clue, ...]
    data: bytes | None = None
    relevant: bool | None = None

    def read(self) -> bytes:
        return read(self.file) if self.data is None else self.data


def is_worth_following(job: ScanJob) -> bool:
    """Whether the flow analysis must read the file, by its bytes alone."""
    try:
        return is_relevant(Searched(job.read()), job.clues)
    except Unreadable:
        return False  # its scan will say why


def scan(job: ScanJob) -> bytes:
    """`Scanned` for one file, encoded: plain bytes travel between processes quickest."""
    return msgspec.json.encode(_scan(job))


def _scan(job: ScanJob) -> Scanned:
    path = job.file.path
    checked = ""
    warnings.simplefilter("ignore")  # invalid escapes in the audited code are not our subject
    try:
        data = job.read()
        checked = digest(data)
        text = decode(data)
        file = Searched(data)
        relevant = is_relevant(file, job.clues) if job.relevant is None else job.relevant
        index = _index(path, file, text, relevant=relevant)
        return Scanned(path, checked, index, suppressions(path, text), relevant)
    except Exception as error:  # whatever is wrong with one file, or with us, costs that file alone
        return Scanned(path, checked or str(error), failure=_failure(path, error))


def _failure(path: str, error: Exception) -> Failure:
    match error:
        case Unreadable():
            return Failure(path, error.line, str(error))
        case SyntaxError():
            return Failure(path, error.lineno or 0, f"{_NOT_PYTHON}: {error.msg}")
        case tokenize.TokenError(args=(message, (line, _))):
            return Failure(path, line, f"{_NOT_PYTHON}: {message}")
        case RecursionError() | MemoryError():
            return Failure(path, 0, "nested too deeply to be analysed")
        case UnicodeError():
            return Failure(path, 0, f"{_NOT_PYTHON}: contains characters that cannot be encoded")
        case _:
            return Failure(path, 0, f"internal error: {type(error).__name__}: {error}")


def _index(path: str, file: Searched, text: str, *, relevant: bool) -> FileIndex:
    """The index of a file that is valid Python, or would be to a newer one."""
    need = Need.WHOLE if relevant else prefilter(file)
    readers = suspects(path, file)
    try:
        return _checked_index(path, text, need, readers)
    except SyntaxError:
        older = in_older_syntax(text)
        if older is None:
            raise
        return _checked_index(path, older, need, readers)


def _checked_index(path: str, text: str, need: Need, readers: tuple[int, ...]) -> FileIndex:
    """Whether a file is valid has to be asked where it is not parsed for its index."""
    if need is Need.NOTHING and not readers:
        symtable.symtable(text, path, "exec")  # two thirds of what ast.parse costs, and it checks as much
    return index_file(path, text, need, readers)
