"""Which files hold work that git does not have yet.

git is only asked for what it has stored; the files are compared here. `git status` would run whatever filters
the audited repository's configuration names.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


def uncommitted(locations: Sequence[str]) -> set[str]:
    """Those of `locations` that differ from the last commit, or are not in it. None where there is no git."""
    by_folder: dict[str, list[str]] = {}
    for location in locations:
        by_folder.setdefault(os.path.dirname(os.path.realpath(location)), []).append(location)  # noqa: PTH120
    return {each for folder, files in by_folder.items() for each in _in(folder, files)}


def _in(folder: str, locations: Sequence[str]) -> Iterator[str]:
    """Those of one folder's files that are not as committed."""
    listed = _git(folder, "ls-tree", "-z", "HEAD", "./")
    if listed is None:
        return
    stored = {}
    for entry in listed.split(b"\0"):
        description, _, name = entry.partition(b"\t")
        if name:
            stored[os.path.basename(os.fsdecode(name))] = description.split()[2].decode()  # noqa: PTH119
    for location in locations:
        file = Path(os.path.realpath(location))
        known = stored.get(file.name)
        if known is None or known != _object_name(file.read_bytes(), len(known)):
            yield location


def _object_name(data: bytes, length: int) -> str:
    """What git calls these bytes: SHA-1 or, in newer repositories, SHA-256."""
    kind = hashlib.sha1 if length == 40 else hashlib.sha256
    return kind(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git(folder: str, *arguments: str) -> bytes | None:
    """What git prints; None where it is missing, or `folder` is in no repository with a commit."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout
