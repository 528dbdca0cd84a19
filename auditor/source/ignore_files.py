"""What .gitignore files and exclude patterns say of a path, in git's order: deepest file, last match."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

DEFAULT_EXCLUDES = frozenset({".git", ".venv", "build", "dist", "__pycache__"})


@dataclass(frozen=True, slots=True)
class IgnoreFile:
    """The patterns of one file, and the folder (with a trailing slash) that they are relative to."""

    folder: str
    spec: GitIgnoreSpec

    def verdict(self, location: str) -> bool | None:
        """True: ignored, False: taken back by a `!` pattern, None: not mentioned."""
        return self.spec.check_file(location.removeprefix(self.folder)).include


def read_ignore_file(folder: str, name: str = ".gitignore") -> IgnoreFile | None:
    """The ignore file in `folder`, or None where there is none that can be read (git treats both alike)."""
    try:
        lines = (Path(folder) / name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    return parsed(folder, lines)


def parsed(folder: str, lines: Iterable[str]) -> IgnoreFile | None:
    """The patterns in `lines`, a malformed one left out as git does; None if nothing is left."""
    valid = [line for line in lines if line.strip() and not line.startswith("#") and _is_valid(line)]
    return IgnoreFile(_with_slash(folder), GitIgnoreSpec.from_lines(valid)) if valid else None


def _is_valid(pattern: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([pattern])
    except ValueError:
        return False
    return True


def _with_slash(folder: str) -> str:
    return folder if folder.endswith(os.sep) else folder + os.sep


@dataclass(frozen=True, slots=True)
class Ignores:
    """All that may exclude a path. `git` goes from the deepest file to the shallowest."""

    excluded: IgnoreFile | None
    git: tuple[IgnoreFile, ...] = ()

    def inside(self, folder: str) -> "Ignores":
        """These and the .gitignore of `folder`."""
        here = read_ignore_file(folder)
        return Ignores(self.excluded, (here, *self.git)) if here else self

    def ignores(self, name: str, location: str) -> bool:
        """Whether the entry called `name` at `location` (a trailing slash marks a folder) is left out."""
        if name in DEFAULT_EXCLUDES:
            return True
        if self.excluded and location.startswith(self.excluded.folder) and self.excluded.verdict(location):
            return True
        verdicts = (file.verdict(location) for file in self.git)
        return next((verdict for verdict in verdicts if verdict is not None), False)


def ignores_above(folder: str, excluded: IgnoreFile | None) -> Ignores:
    """What applies to the entries of `folder` from above it: .gitignore files up to the repository's root.

    A file that ignores `folder` itself is left out, since whoever names a folder wants it audited.
    """
    parents = [os.fspath(parent) for parent in (Path(folder), *Path(folder).parents)]
    root = next((number for number, parent in enumerate(parents) if (Path(parent) / ".git").exists()), 0)
    found = [read_ignore_file(parent) for parent in parents[1 : root + 1]]
    found.append(read_ignore_file(parents[root], ".git/info/exclude"))
    return Ignores(excluded, tuple(file for file in found if file and not _ignores_folder(file, folder)))


def _ignores_folder(file: IgnoreFile, folder: str) -> bool:
    """Whether `file` ignores `folder` itself or a folder around it."""
    return folder != file.folder.rstrip(os.sep) and bool(file.verdict(_with_slash(folder)))
