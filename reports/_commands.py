"""Commands to copy: they name what was audited, for a file by itself may be understood otherwise.

A pool that is defined in another file is known only if that file is read too.
"""

import shlex
from collections import Counter

from auditor.model import ClassRow, Run
from reports._text import safe

MOST = 4  # paths in one command; a hook that was given five hundred means each file by itself
STDIN = "-"


def target(run: Run) -> str | None:
    """The paths of the audit as words for a shell; None where each file is to stand for itself."""
    return " ".join(map(word, run.paths)) if 0 < len(run.paths) <= MOST else None


def word(text: str) -> str:
    """One word for a shell, never an option; line breaks and escapes become visible characters."""
    return shlex.quote(f"./{safe(text)}" if text.startswith("-") and text != STDIN else safe(text))


def adoptions(run: Run) -> dict[ClassRow, str]:
    """How to see what `adopt` would do, for each class that it would edit."""
    if STDIN in run.paths:
        return {}
    everywhere = target(run)
    namesakes = Counter(row.name for row in run.classes)
    found = {}
    for row in run.classes:
        if adoptable(row):
            where = everywhere if everywhere and namesakes[row.name] == 1 else word(row.path)
            found[row] = f"poolaudit adopt --diff {where} --class {word(row.name)}"
    return found


def adoptable(row: ClassRow) -> bool:
    """Whether `adopt` has something to do here; what has a pool already is a matter of its findings."""
    return row.support == "none" and row.edits is not None
