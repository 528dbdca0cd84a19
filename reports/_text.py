"""Text of the audited tree made harmless for a terminal, and measured in terminal cells.

Source lines, paths and messages may hold anything: escapes that move the cursor, bidirectional controls that
show code in another order than it runs, line breaks in file names. Every such character becomes one visible
character, so that columns still count right.
"""

import unicodedata
from collections.abc import Iterator

from rich.cells import cell_len

TAB = "    "
ELLIPSIS = "..."


def safe(text: str) -> str:
    """`text` on one line, without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(safe_char(char) for char in text)


def safe_char(char: str) -> str:
    """What is shown for one character; only a tab becomes more than one."""
    if char.isprintable():
        return char
    if char == "\t":
        return TAB
    if char < " ":
        return chr(0x2400 + ord(char))  # the control picture: U+241B for escape
    if char == "\x7f":
        return "\u2421"
    return char if unicodedata.category(char) == "Zs" else "\ufffd"


def cells(text: str) -> int:
    """Terminal columns that harmless `text` takes: two for CJK and emoji, none for combining marks."""
    return len(text) if text.isascii() else cell_len(text)


def wrap(text: str, width: int, *, first: int = 0, hanging: int = 0) -> list[str]:
    """Lines of at most `width` cells, indented by `first`, then by `hanging`. Long words are broken."""
    lines: list[str] = []
    line = " " * first
    for word in safe(text).split(" "):
        joined = f"{line} {word}" if line.strip() else line + word
        if cells(joined) <= width:
            line = joined
            continue
        if line.strip():
            lines.append(line)
            line = " " * hanging
        *full, line = _broken(line + word, width, hanging)
        lines += full
    return [*lines, line]


def _broken(word: str, width: int, hanging: int) -> Iterator[str]:
    """`word` in pieces that fit; the last one is what later words may follow."""
    piece = ""
    for char in word:
        if cells(piece + char) > width:
            yield piece
            piece = " " * hanging
        piece += char
    yield piece


def shorten(text: str, width: int) -> str:
    """`text` cut at its end to `width` cells, with an ellipsis where something was lost."""
    near = text[: 4 * width]  # of a line of many megabytes, no more than could be shown
    shown = safe(near)
    if len(near) == len(text) and cells(shown) <= width:
        return shown
    while shown and cells(shown) > width - len(ELLIPSIS):
        shown = shown[:-1]
    return shown + ELLIPSIS
