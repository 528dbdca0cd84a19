"""A fix as the hunks of a diff, made of its edits and the source lines that the run carries.

Lines that are in the sources already are named by number, so that five thousand diffs cost only what
they add.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from auditor.model import Edit

CONTEXT = 2
Lines = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Hunk:
    """`rows` in order: a positive number is a line that stays, a negative one goes, a text is new."""

    path: str
    rows: tuple[int | str, ...]


def hunks(edits: Iterable[Edit], excerpts: Mapping[str, Lines]) -> tuple[Hunk, ...]:
    """Nothing where the text of an edited line is not at hand: half a fix would be another fix."""
    found: list[Hunk] = []
    for path, of_file in groupby(sorted(edits, key=lambda edit: edit.span), lambda edit: edit.span.path):
        lines = excerpts.get(path, {})
        for together in _neighbours(list(of_file), lines):
            rows = _rows(together, lines)
            if rows is None:
                return ()
            found.append(Hunk(path, rows))
    return tuple(found)


def _neighbours(edits: Sequence[Edit], lines: Lines) -> Iterator[list[Edit]]:
    """Edits whose lines are so near that one hunk shows them, as far as the lines between are at hand."""
    group: list[Edit] = []
    for edit in edits:
        if group:
            end = max(each.span.end_line for each in group)
            between = range(end + 1, edit.span.line)
            if len(between) > 2 * CONTEXT or any(number not in lines for number in between):
                yield group
                group = []
        group.append(edit)
    yield group


def _rows(edits: Sequence[Edit], lines: Lines) -> tuple[int | str, ...] | None:
    first = edits[0].span.line
    last = max(edit.span.end_line for edit in edits)
    if any(number not in lines and not _before(number, edits) for number in range(first, last + 1)):
        return None
    old = [lines.get(number, "").rstrip("\r\n") for number in range(first, last + 1)]
    rows: list[int | str] = list(range(first - CONTEXT, first))
    new = _edited(old, first, edits)
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        numbers = range(first + start, first + end)
        rows += numbers if kind == "equal" else [-number for number in numbers]
        rows += [] if kind == "equal" else new[new_start:new_end]
    rows += range(last + 1, last + 1 + CONTEXT)
    return _trimmed([row for row in rows if isinstance(row, str) or abs(row) in lines])


def _trimmed(rows: Sequence[int | str]) -> tuple[int | str, ...]:
    """CONTEXT lines around the first and the last change."""
    changed = [index for index, row in enumerate(rows) if isinstance(row, str) or row < 0]
    if not changed:
        return ()
    return tuple(rows[max(changed[0] - CONTEXT, 0) : changed[-1] + 1 + CONTEXT])


def _before(number: int, edits: Iterable[Edit]) -> bool:
    """Whether `number` is only a place to insert whole lines before: what it says, if it is there, stays."""
    touching = [edit for edit in edits if edit.span.line <= number <= edit.span.end_line]
    return all(
        (edit.span.line, edit.span.column) == (edit.span.end_line, edit.span.end_column) == (number, 1)
        and edit.replacement.endswith("\n")
        for edit in touching
    )


def _edited(old: Sequence[str], first: int, edits: Sequence[Edit]) -> list[str]:
    text = "\n".join(old)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line) + 1)
    for edit in reversed(edits):
        start = starts[edit.span.line - first] + edit.span.column - 1
        end = starts[edit.span.end_line - first] + edit.span.end_column - 1
        text = text[:start] + edit.replacement + text[end:]
    return [line.rstrip("\r") for line in text.split("\n")]
