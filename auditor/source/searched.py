"""The bytes of a file beside its words, each once, which are asked first whether something stands in it."""

import re
from collections.abc import Iterator
from functools import cached_property, lru_cache

_WORD = re.compile(rb"\w+")
_SPACED = bytes(one if _WORD.match(bytes([one])) else ord(" ") for one in range(256))


class Searched:
    """Bytes in which a few things are looked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def has(self, needle: bytes) -> bool:
        """Whether `needle` stands in the file."""
        return needle in self.data

    def may_say(self, words: frozenset[bytes]) -> bool:
        """Whether one of these words may stand in the file: nothing is known of them, so they may."""
        return True


class Listed(Searched):
    """Bytes in which many things are looked for: among their words first, each of which is listed once.

    A file says the same few hundred words over and over. To list them costs as much as looking for some 25
    substrings; a whole word is then found at once, and part of one in a fifth of the time.
    """

    def has(self, needle: bytes) -> bool:
        """Whether `needle` stands in the file."""
        hint, is_word = _hint(needle)
        if hint not in (self._words if is_word else self._listed):
            return False
        return hint is needle or needle in self.data

    def may_say(self, words: frozenset[bytes]) -> bool:
        """Whether one of these words stands in the file."""
        return not words.isdisjoint(self._words)

    def says(self, word: re.Pattern[bytes]) -> bool:
        """Whether some word has in it what the pattern matches."""
        return word.search(self._listed) is not None

    @cached_property
    def _words(self) -> frozenset[bytes]:
        return frozenset(self.data.translate(_SPACED).split())

    @cached_property
    def _listed(self) -> bytes:
        return b" %b " % b" ".join(self._words)


def places(needle: bytes, data: bytes) -> Iterator[tuple[int, int]]:
    """Where it stands, after where its line begins."""
    for found in _sought(needle).finditer(data):
        at = found.end() - len(needle)
        yield data.rfind(b"\n", 0, at) + 1, at


def before(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """What the pattern finds in the line before each place of this needle."""
    for start, at in places(needle, data):
        if found := pattern.search(data, start, at):
            yield found[1]


def ending_before(needle: bytes, pattern: re.Pattern[bytes], data: bytes) -> Iterator[bytes]:
    """The same for what begins at the last dot of that line, which is found sooner."""
    for start, at in places(needle, data):
        dot = data.rfind(b".", start, at)
        if dot >= 0 and (found := pattern.match(data, dot, at)):
            yield found[1]


@lru_cache(maxsize=1 << 10)
def _sought(needle: bytes) -> re.Pattern[bytes]:
    """A pattern of it that begins with its first sign: ` -= ` is found in a third of the time if the blank,
    which is everywhere, is looked at last."""
    return re.compile(rb"%b(?<=%b)" % (re.escape(needle.lstrip(b" ")), re.escape(needle)))


@lru_cache(maxsize=1 << 10)
def _hint(needle: bytes) -> tuple[bytes, bool]:
    """What must stand in the list of words where `needle` stands in a file, and whether that is a whole word:
    of `.eval()` it is `eval`, of `_hook(` it is the end of one, `_hook `."""
    word = max(_WORD.finditer(needle), key=lambda found: len(found[0]), default=None)
    if word is None:
        return b"", False  # the list holds nothing but letters and digits of ASCII
    if word[0] == needle:
        return needle, False
    begins, ends = word.start() > 0, word.end() < len(needle)
    return (word[0], True) if begins and ends else (b" " * begins + word[0] + b" " * ends, False)
