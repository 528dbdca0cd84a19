"""Which files the flow analysis must read: judged from bytes, by what they mention."""

import re
from dataclasses import dataclass
from functools import cache

from auditor.protocols.vocabulary import some_undo_others
from auditor.source.both_ways import works_both_ways
from auditor.source.ended_elsewhere import ends_elsewhere

_DEFINED = re.compile(rb"def(?<!\wdef)[ \t]+(\w+)\(")  # a literal first: searched several times as fast


@dataclass(frozen=True, slots=True)
class Clue:
    """A file is relevant if `pattern` is found in it; that starts with `needle`, which is quickly found."""

    needle: bytes
    pattern: bytes


def is_relevant(data: bytes, looked_for: tuple[Clue, ...]) -> bool:
    """Substring search first, which runs at memory speed; a regular expression only where that succeeds."""
    for root, clues in _by_root(looked_for):
        if root in data:
            for clue in clues:
                if clue.needle in data and _compiled(clue.pattern).search(data):
                    return True
    return bool(looked_for) and (_defines_opposites(data) or works_both_ways(data) or ends_elsewhere(data))


def _defines_opposites(data: bytes) -> bool:
    """Functions of which one, by its name, undoes another."""
    return some_undo_others({name.decode(errors="replace") for name in _DEFINED.findall(data)})


@cache
def _by_root(looked_for: tuple[Clue, ...]) -> list[tuple[bytes, list[Clue]]]:
    """The clues by the shortest needle within theirs: where no `alloc` is, `dealloc` is not looked for."""
    needles = sorted({clue.needle for clue in looked_for}, key=len)
    clues: dict[bytes, list[Clue]] = {}
    for clue in looked_for:
        root = next(needle for needle in needles if needle in clue.needle)
        clues.setdefault(root, []).append(clue)
    return list(clues.items())


@cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)
