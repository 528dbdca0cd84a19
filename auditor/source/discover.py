"""Which files an audit is about: the arguments walked, each file once, whatever the order they come in."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """The Python files under `arguments`; `exclude` holds .gitignore patterns relative to `root`.

    A file that several arguments or symbolic links lead to is there once.
    """
    failures: list[Failure] = []
    excluded = parsed(root, exclude)
    found: dict[str, SourceFile] = {}
    for argument in sorted(set(arguments)):
        for real, location in _under(argument, excluded, failures):
            candidate = SourceFile(shown(location), location)
            known = found.setdefault(real, candidate)
            found[real] = min(
                known, candidate, key=lambda file: (file.location != real, len(file.path), file)
            )
    return Discovered(tuple(sorted(found.values())), tuple(sorted(set(failures), key=lambda f: f.path)))


def shown(location: str) -> str:
    """The path as reports show it: relative to the working directory, forward slashes, valid UTF-8."""
    here = os.getcwd() + os.sep  # noqa: PTH109 - thousands of times, and Path is slow
    if location.startswith(here):
        location = location[len(here) :]
    elif location != STDIN:
        location = os.path.relpath(location)
    return location.replace(os.sep, "/").encode("utf-8", "replace").decode()


def _under(argument: str, excluded: IgnoreFile | None, failures: list[Failure]) -> Iterator[tuple[str, str]]:
    """Real path and location of every source file that `argument` leads to."""
    if argument == STDIN:
        yield STDIN, STDIN
        return
    location = os.path.abspath(argument)  # noqa: PTH100 - Path.absolute keeps `..`, which globs cannot match
    try:
        is_folder = stat.S_ISDIR(Path(location).stat().st_mode)
    except OSError as error:
        if not os.path.lexists(location):
            raise NoSuchPath(f"{argument}: no such file or directory") from error
        is_folder = False  # a link to nowhere, or one we may not follow: reading it names the failure
    real = os.path.realpath(location)
    if not is_folder:
        yield real, location
        return
    for entry in _walk(location, ignores_above(location, excluded), failures):
        is_link = entry.is_symlink()
        yield os.path.realpath(entry.path) if is_link else real + entry.path[len(location) :], entry.path


def _walk(folder: str, ignores: Ignores, failures: list[Failure]) -> Iterator[os.DirEntry[str]]:
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
                yield entry


def _is_source(entry: os.DirEntry[str]) -> bool:
    """A file, or a link to one or to nowhere, with a suffix of ours: no folder or pipe called x.py."""
    if not entry.name.endswith(SUFFIXES):
        return False
    if not entry.is_symlink():
        return entry.is_file(follow_symlinks=False)
    try:
        return stat.S_ISREG(entry.stat().st_mode)
    except OSError:
        return True  # reading it names the failure
