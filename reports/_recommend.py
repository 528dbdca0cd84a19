"""What to do about the pool, module by module: how urgent and why, how many bytes, how many edits.

Bytes are a product of the shape in the code, and a number only under assumptions that stand beside it.
Effort is the number of edits that `adopt` would make. Nothing else is promised: nobody knows what is saved
before the code has run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from auditor.model import ClassRow, Run
from reports._commands import adoptable, adoptions
from reports._estimate import assumptions, powers, size

_PRIORITY = ("high", "medium", "low", None)
_SUPPORT = ("none", "partial")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`size` and `assumed` are empty where the code tells no shape; `command` where `adopt` does nothing."""

    row: ClassRow
    size: str = ""
    assumed: str = ""
    command: str = ""


def recommendations(run: Run) -> list[Recommendation]:
    """The classes that `adopt` would edit, and those that use the pool but have findings; most urgent first.

    A class that takes and never gives back is not told to finish where no rule complains: its callers may.
    """
    commands = adoptions(run)
    complained = {(finding.span.path, part) for finding in run.findings for part in _owners(finding.symbol)}
    wanting = [
        row
        for row in run.classes
        if adoptable(row)
        or (row.support == "partial" and row.edits is not None and (row.path, row.name) in complained)
    ]
    return [_recommended(row, commands.get(row, "")) for row in sorted(wanting, key=_urgency)]


def _owners(symbol: str) -> Iterator[str]:
    """`A`, `A.B` and `A.B.c` of `A.B.c`."""
    parts = symbol.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def nothing_to_edit(run: Run) -> int:
    """How many classes without full support allocate large tensors of which none may be pooled."""
    wanting = [row for row in run.classes if row.support != "full" and row.priority is not None]
    return sum(row.edits is None for row in wanting)


def assumed(row: ClassRow) -> str:
    """`b is batch 1, n is length 8,192`; empty where the code tells no shape."""
    named = assumptions(row.estimated_bytes or "")
    return ", ".join(f"{symbol} is {value}" for symbol, value in named)


def _recommended(row: ClassRow, command: str) -> Recommendation:
    told = size(row.estimated_bytes) if row.estimated_bytes else ""
    return Recommendation(row, told, assumed(row), command)


def _urgency(row: ClassRow) -> tuple[int, int, int, str, int]:
    """Priority, then what is without a pool, then what grows fastest with the length."""
    priority = _PRIORITY.index(row.priority) if row.priority in _PRIORITY else len(_PRIORITY)
    support = _SUPPORT.index(row.support) if row.support in _SUPPORT else len(_SUPPORT)
    length = powers(row.estimated_bytes).length if row.estimated_bytes else 0
    return priority, support, -length, row.path, row.line
