"""A rewritten draft as edits of the file that it came from, so that no byte beside them changes."""

import difflib
from collections.abc import Iterator

from auditor.adopt.draft import Draft
from auditor.fixes.document import Document
from auditor.model import Edit, Span
from auditor.source.load import lines_of


def edits(document: Document, draft: Draft) -> list[Edit]:
    """The smallest edits, by lines and within them, that make `draft` of `document`."""
    old, new = lines_of(document.text), list(draft.lines)
    if old == new:
        return []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    found: list[Edit] = []
    for kind, first, last, start, stop in matcher.get_opcodes():
        if kind == "replace" and last - first == stop - start:
            for offset in range(last - first):
                found += _within(document, first + offset + 1, old[first + offset], new[start + offset])
        elif kind != "equal":
            found.append(_lines(document, old, first, last, new[start:stop]))
    return found


def _within(document: Document, row: int, old: str, new: str) -> Iterator[Edit]:
    """The part of a line that differs; lines that are equal but for their indentation are many."""
    if old == new:
        return
    head = next(
        (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    span = Span(document.path, row, head + 1, row, len(old) - tail + 1)
    yield Edit(span, new[head : len(new) - tail])


def _lines(document: Document, old: list[str], first: int, last: int, new: list[str]) -> Edit:
    """Whole lines: `old[first:last]` become `new`."""
    text = document.newline.join(new)
    path = document.path
    if last < len(old):  # up to the beginning of the line that stays
        ended = f"{text}{document.newline}" if new else ""
        return Edit(Span(path, first + 1, 1, last + 1, 1), ended)
    end = len(old[-1]) + 1
    if first == len(old):
        return Edit(Span(path, len(old), end, len(old), end), document.newline + text)
    return Edit(Span(path, first + 1, 1, len(old), end), text)
