"""Which files the flow analysis must read: judged from bytes, by what they mention."""

import re
from dataclasses import dataclass
from functools import cache

from auditor.protocols.vocabulary import some_undo_others
from auditor.source.both_ways import works_both_ways
from auditor.source.ended_elsewhere import ends_elsewhere
from auditor.source.searched import Listed

_DEFINED = re.compile(rb"def(?<!\wdef)[ \t]+(\w+)\(")  # a literal first: searched several times as fast


@dataclass(frozen=True, slots=True)
class Clue:
    """A file is relevant if `pattern` is found in it. That starts with `needle`, which is quickly found; if
    given, `word` matches in one of the file's words where `pattern` does in the file."""

    needle: bytes
    pattern: bytes
    word: bytes = b""


def is_relevant(file: Listed, looked_for: tuple[Clue, ...]) -> bool:
    """Its words are asked first, and the file itself only for what is among them."""
    for root, clues in _by_root(looked_for):
        if file.has(root) and any(_is_found(clue, file) for clue in clues):
            return True
    if not looked_for:
        return False
    return _defines_opposites(file.data) or works_both_ways(file) or ends_elsewhere(file)


def _is_found(clue: Clue, file: Listed) -> bool:
    if not file.has(clue.needle) or (clue.word and not file.says(_compiled(clue.word))):
        return False
    return _compiled(clue.pattern).search(file.data) is not None


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
