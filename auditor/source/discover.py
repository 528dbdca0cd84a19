"""Which files an audit is about: the arguments walked, each file once, in an order that does not depend on them."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from auditor.model import Failure
from auditor.source.ignore_files import IgnoreFile, Ignores, ignores_above, parsed

SUFFIXES = (".py", ".pyi")
STDIN = "-"


class NoSuchPath(Exception):
    """An argument names nothing; the message says which."""


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """One file to audit: `path` as reports show it, `location` as the system opens it."""

    path: str
    location: str


@dataclass(frozen=True, slots=True)
class Discovered:
    files: tuple[SourceFile, ...]
    failures: tuple[Failure, ...]


def discover(arguments: Sequence[str], *, root: str, exclude: Iterable[str] = ()) -> Discovered:
    """The Python files under `arguments`; `exclude` holds .gitignore patterns relative to `root`."""
    failures: list[Failure] = []
    excluded = parsed(root, exclude)
    found: dict[str, SourceFile] = {}
    for argument in sorted(set(arguments)):
        for location in _under(argument, excluded, failures):
            _add(found, location)
    return Discovered(tuple(sorted(found.values())), tuple(sorted(set(failures), key=lambda f: f.path)))


def shown(location: str) -> str:
    """The path as reports show it: relative to the working directory, forward slashes, always printable as UTF-8."""
    if location == STDIN:
        return STDIN
    relative = os.path.relpath(location)
    return relative.replace(os.sep, "/").encode("utf-8", "replace").decode()


def _add(found: dict[str, SourceFile], location: str) -> None:
    """Keep one name a file: not a symbolic link where the file itself is there, then the first by the alphabet."""
    real = STDIN if location == STDIN else os.path.realpath(location)
    candidate = SourceFile(shown(location), location)
    known = found.get(real)
    if known is None or (candidate.location != real, candidate) < (known.location != real, known):
        found[real] = candidate


def _under(argument: str, excluded: IgnoreFile | None, failures: list[Failure]) -> Iterator[str]:
    if argument == STDIN:
        yield STDIN
        return
    location = os.path.abspath(argument)  # noqa: PTH100 - Path.absolute keeps `..`, which globs cannot match
    try:
        mode = os.stat(location).st_mode
    except OSError as error:
        if not os.path.lexists(location):
            raise NoSuchPath(f"{argument}: no such file or directory") from error
        yield location  # a link to nowhere, or a folder we may not enter: reading it names the failure
        return
    if stat.S_ISDIR(mode):
        yield from _walk(location, ignores_above(location, excluded), failures)
    else:
        yield location


def _walk(folder: str, ignores: Ignores, failures: list[Failure]) -> Iterator[str]:
    """Every source file below `folder`. Links to folders are not followed, so there are no loops."""
    waiting = [(folder, ignores)]
    while waiting:
        folder, ignores = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            failures.append(Failure(shown(folder), 0, f"cannot be listed: {error.strerror}"))
            continue
        if any(entry.name == ".gitignore" for entry in entries):
            ignores = ignores.inside(folder)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not ignores.ignores(entry.name, entry.path + "/"):
                    waiting.append((entry.path, ignores))
            elif _is_source(entry) and not ignores.ignores(entry.name, entry.path):
                yield entry.path


def _is_source(entry: os.DirEntry[str]) -> bool:
    """A file, or a link to one or to nowhere, with a suffix of ours: no folder, socket or pipe called x.py."""
    if not entry.name.endswith(SUFFIXES):
        return False
    return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
