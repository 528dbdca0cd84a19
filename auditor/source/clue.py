"""Which files the flow analysis must read: judged from bytes, by what they mention."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Clue:
    """A file is relevant if `pattern` is found in it; that starts with `needle`, which is quickly found."""

    needle: bytes
    pattern: bytes


def is_relevant(data: bytes, looked_for: Iterable[Clue]) -> bool:
    """Substring search first, which runs at memory speed; a regular expression only where that succeeds."""
    return any(clue.needle in data and _compiled(clue.pattern).search(data) for clue in looked_for)


@cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)
