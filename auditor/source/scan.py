"""What a worker process does with one file: read, decode, index, find suppressions, judge its relevance."""

import ast
import symtable
import sys
import tokenize
import warnings
from dataclasses import dataclass

import msgspec

from auditor.model import Failure, confession
from auditor.source.clue import Clue, is_relevant
from auditor.source.discover import SourceFile
from auditor.source.index import FileIndex, Need, index_file, prefilter
from auditor.source.lifetime.read import suspects
from auditor.source.load import Unreadable, decode, digest, read
from auditor.source.newer_syntax import in_older_syntax
from auditor.source.parse import Parse
from auditor.source.searched import Listed
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
class Sight:
    """What the bytes of a file tell: whether the flow analysis must read it, what the index needs of it, and
    who may find in it what outlives its use."""

    relevant: bool
    need: Need
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScanJob:
    """A file to scan and the clues that make it relevant; `data` where its bytes are at hand (stdin), `sight`
    where it has been looked at before."""

    file: SourceFile
    clues: tuple[Clue, ...]
    data: bytes | None = None
    sight: Sight | None = None

    @property
    def relevant(self) -> bool:
        """Whether it is known that the flow analysis must read the file."""
        return self.sight is not None and self.sight.relevant

    def read(self) -> bytes:
        return read(self.file) if self.data is None else self.data


def look_at(job: ScanJob) -> Sight | None:
    """What the bytes of the file tell; nothing where it cannot be read, and its scan will say why."""
    try:
        return _sight(job, job.read())
    except Unreadable:
        return None


def _sight(job: ScanJob, data: bytes) -> Sight:
    file = Listed(data)
    relevant = is_relevant(file, job.clues)
    return Sight(relevant, Need.WHOLE if relevant else prefilter(file), suspects(job.file.path, file))


def scan(job: ScanJob) -> bytes:
    """`Scanned` for one file, encoded: plain bytes travel between processes quickest."""
    return msgspec.json.encode(scanned(job))


def scanned(job: ScanJob, parse: Parse = ast.parse) -> Scanned:
    path = job.file.path
    checked = ""
    warnings.simplefilter("ignore")  # invalid escapes in the audited code are not our subject
    try:
        data = job.read()
        checked = digest(data)
        text = decode(data)
        sight = job.sight or _sight(job, data)
        index = _index(path, text, sight, parse)
        return Scanned(path, checked, index, suppressions(path, text), sight.relevant)
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
            return Failure(path, 0, confession(error))


def _index(path: str, text: str, sight: Sight, parse: Parse) -> FileIndex:
    """The index of a file that is valid Python, or would be to a newer one."""
    try:
        return _checked_index(path, text, sight, parse)
    except SyntaxError:
        older = in_older_syntax(text)
        if older is None:
            raise
        return _checked_index(path, older, sight, parse)


def _checked_index(path: str, text: str, sight: Sight, parse: Parse) -> FileIndex:
    """Whether a file is valid has to be asked where it is not parsed for its index."""
    if sight.need is Need.NOTHING and not sight.readers:
        symtable.symtable(text, path, "exec")  # two thirds of what ast.parse costs, and it checks as much
    return index_file(path, text, sight.need, sight.readers, parse)
