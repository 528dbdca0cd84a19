"""Which lines changed since a git revision, for --diff-base."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from auditor.model import Finding

_HUNK = re.compile(rb"^@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NEW_FILE = re.compile(rb'^\+\+\+ (?:"?b/)?([^\t\n]*?)"?\t?$')


class DiffError(Exception):
    """git could not say what changed; the message says why and what to do."""


class ChangedLines:
    """Lines of the working tree that differ from a revision; of files unknown to git, all."""

    def __init__(self, ranges: dict[str, list[range]], new_files: frozenset[str]) -> None:
        self._ranges = ranges
        self._new_files = new_files

    def touch(self, finding: Finding) -> bool:
        """Whether the finding, or a step of the path that it shows, is on a changed line."""
        span = finding.span
        return self._changed(span.path, span.line, span.end_line) or any(
            self._changed(step.path, step.line, step.line) for step in finding.trace
        )

    def _changed(self, path: str, first: int, last: int) -> bool:
        real = os.path.realpath(path)
        ranges = self._ranges.get(real, ())
        return real in self._new_files or any(r.start <= last and first < r.stop for r in ranges)


def changed_since(revision: str, folder: Path) -> ChangedLines:
    """What changed in the repository around `folder` since `revision`, committed or not."""
    top = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    ).strip()
    diff = _git(
        top, "-c", "core.quotePath=false", "diff", "-U0", "--no-color", "--no-ext-diff", "--no-textconv",
        "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", os.fsdecode(commit), "--",
    )  # fmt: skip
    new = _git(top, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0")
    return ChangedLines(
        _ranges(iter(diff.split(b"\n")), top), frozenset(_real(top, name) for name in new if name)
    )


def _ranges(lines: Iterator[bytes], top: Path) -> dict[str, list[range]]:
    """The added and changed lines of each file in a `git diff -U0`."""
    ranges: dict[str, list[range]] = {}
    path = ""
    for line in lines:
        if line.startswith(b"+++ ") and (name := _NEW_FILE.match(line)):
            path = _real(top, name[1])
        elif hunk := _HUNK.match(line):
            removed, start, added = (int(number or 1) for number in hunk.groups())
            ranges.setdefault(path, []).append(range(start, start + added))
            for _ in range(removed + added):  # skipped, since an added `++ x` looks like a header
                next(lines, None)
    return ranges


def _real(top: Path, name: bytes) -> str:
    return os.path.realpath(top / os.fsdecode(name))


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments], cwd=folder, capture_output=True, check=False
        )
    except OSError as error:
        raise DiffError(f"--diff-base needs git: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().removeprefix("fatal: ")
        raise DiffError(f"--diff-base: git {arguments[0]} failed in {folder}: {said or 'no such revision'}")
    return done.stdout
