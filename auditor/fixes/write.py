"""Changed files onto the disk: each whole or not at all, and none that is not the one that was analysed."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from auditor.atomic import write_atomically
from auditor.fixes.document import Document
from auditor.source.discover import SourceFile
from auditor.source.load import Unreadable, read

Write = Callable[[Path, bytes], None]


@dataclass(frozen=True, slots=True)
class Change:
    """One file before and after."""

    file: SourceFile
    before: Document
    after: Document


@dataclass(frozen=True, slots=True)
class Written:
    """The paths that were written, and why each of the others was not."""

    paths: tuple[str, ...]
    refused: Mapping[str, str]


def write_all(
    changes: Sequence[Change], together: Iterable[Sequence[str]] = (), write: Write = write_atomically
) -> Written:
    """Write every change whose file is still what it was when it was analysed.

    `together` lists paths that one fix changes: if one of them cannot be written, none of them is. That
    holds for everything that can be known beforehand; a disk that fills up in the middle ends the run with
    every file either old or new.
    """
    groups = grouped([change.file.path for change in changes], together)
    refused: dict[str, str] = {}
    for change in changes:
        if why := obstacle(change.file, change.before):
            others = groups[change.file.path]
            refused |= {
                path: why if path == change.file.path else f"{change.file.path} {why}" for path in others
            }
    paths = []
    for change in changes:
        if change.file.path not in refused:
            if why := obstacle(change.file, change.before):  # while the others were written
                refused[change.file.path] = why
                continue
            try:
                write(Path(change.file.location), change.after.data)
            except OSError as error:
                refused[change.file.path] = f"cannot be written: {error.strerror or error}"
            else:
                paths.append(change.file.path)
    return Written(tuple(paths), refused)


def obstacle(file: SourceFile, analysed: Document) -> str:
    """Why `file` must not be written; empty if it may be."""
    if why := unwritable(file.location):
        return why
    try:
        same = read(file) == analysed.data
    except Unreadable as error:
        return str(error)
    return "" if same else "has changed since it was analysed"


def unwritable(location: str) -> str:
    """Why nothing can be written there; empty if it can be."""
    target = os.path.realpath(location)
    if not Path(target).exists():
        return "is no longer there"
    if not os.access(target, os.W_OK) or not _has_write_bit(target):
        return "is read-only"
    return "" if os.access(Path(target).parent, os.W_OK) else "is in a folder that cannot be written"


def _has_write_bit(target: str) -> bool:
    """Root may write anything; that somebody took the write bits away still means: leave it alone."""
    return bool(Path(target).stat().st_mode & 0o222)


def grouped(paths: Iterable[str], together: Iterable[Sequence[str]]) -> dict[str, frozenset[str]]:
    """Each path with all that it hangs together with, itself included."""
    groups = {path: frozenset({path}) for path in paths}
    for bound in together:
        known = [path for path in bound if path in groups]
        union = frozenset().union(*(groups[path] for path in known)) if known else frozenset()
        groups |= dict.fromkeys(union, union)
    return groups
