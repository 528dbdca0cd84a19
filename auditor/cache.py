"""What earlier runs found, kept as JSON and taken up again only where nothing that decides it has changed."""

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from auditor import __version__
from auditor.atomic import write_atomically
from auditor.config import AnalysisSettings

DIRECTORY = ".poolaudit_cache"
KEPT = 16  # sets of arguments remembered; the least recently used are dropped
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# The cache of poolaudit; it may be deleted.\n"
Kind = TypeVar("Kind")


class Entry(msgspec.Struct, frozen=True):
    """One stored answer, and the digest of everything that it depends on."""

    key: str
    value: msgspec.Raw


class Cache:
    """The answers for one set of arguments, in a folder of their own below `directory`.

    `directory=None` remembers nothing. A folder that cannot be written is said once, in `warning`, and then
    works like that too; whatever cannot be read back is a miss.
    """

    remembers = True
    """Whether it is worth saying what an answer depends on."""

    def __init__(self, directory: Path | None, arguments: object) -> None:
        self.remembers = directory is not None
        self._folder = directory / fingerprint(arguments)[:16] if directory else None
        self.warning: str | None = None

    def has(self, name: str) -> bool:
        """Whether there is any answer called `name`, so that asking for it is worth computing its key."""
        return self._folder is not None and (self._folder / f"{name}.json").exists()

    def get(self, name: str, key: str, kind: type[Kind]) -> Kind | None:
        """The answer called `name`, if it was computed from exactly what `key` stands for."""
        if self._folder is None:
            return None
        try:
            entry = msgspec.json.decode((self._folder / f"{name}.json").read_bytes(), type=Entry)
            return msgspec.json.decode(entry.value, type=kind) if entry.key == key else None
        except (OSError, msgspec.MsgspecError, RecursionError, UnicodeError):
            return None

    def put(self, name: str, key: str, value: object) -> None:
        if self._folder is None:
            return
        try:
            if not self._folder.is_dir():
                _prepare(self._folder)
            encoded = msgspec.json.encode(Entry(key, msgspec.Raw(msgspec.json.encode(value))))
            write_atomically(self._folder / f"{name}.json", encoded)
        except OSError as error:
            self.warning = f"no cache: {self._folder.parent}: {error.strerror or error}"
            self._folder = None


def _prepare(folder: Path) -> None:
    """Make the folder for one set of arguments, mark the cache as such, drop the sets used longest ago."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
        if not (folder.parent / name).exists():
            write_atomically(folder.parent / name, text.encode())
    sets = sorted((entry for entry in folder.parent.iterdir() if entry.is_dir()), key=_last_use, reverse=True)
    for old in sets[KEPT:]:
        _remove(old)


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another run has just dropped it
        return 0.0


def _remove(folder: Path) -> None:
    """Delete the answers of one set; a run that uses it at this moment sees misses, nothing worse."""
    for entry in folder.glob("*"):
        entry.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def fingerprint(*parts: object) -> str:
    """A digest of plain data."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def tool_digest(settings: AnalysisSettings) -> str:
    """What every answer depends on besides the files: this program, its rules, Python, the settings."""
    return fingerprint(__version__, sys.version, _program(), settings)


@functools.cache
def _program() -> dict[str, str]:
    """What this process runs, whatever is installed over it meanwhile."""
    return {path: _sha(path) for folder in ("auditor", "rules") for path in _program_files(folder)}


def _program_files(package: str) -> list[str]:
    root = Path(__file__).parent.parent
    found = []
    for folder, _, names in os.walk(root / package):
        found += [f"{folder}/{name}" for name in names if name.endswith((".py", ".toml"))]
    return sorted(found)


def _sha(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
