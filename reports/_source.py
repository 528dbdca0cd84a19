"""A source line cut to what fits, with the cells at which its characters landed."""

from dataclasses import dataclass

from reports._text import ELLIPSIS, cells, safe_char


@dataclass(frozen=True, slots=True)
class View:
    """`text` as shown; a caret under the asked-for characters starts at cell `start` and is `length` wide."""

    text: str
    start: int
    length: int


def view(line: str, start: int, end: int, width: int) -> View:
    """`line` around its characters `start` to `end` (from 0, half-open) in at most `width` cells.

    Only the neighbourhood of `start` is looked at, so that a line of many megabytes costs nothing.
    """
    start = min(start, len(line))
    line += " " * (start == len(line))  # a caret past the end needs a cell to stand under
    end = max(min(end, len(line)), start + 1)
    first = max(0, start - 2 * width)
    shown = [safe_char(char) for char in line[first : start + 4 * width]]
    sizes = [cells(text) for text in shown]
    left, right = _window(sizes, start - first, end - first, width, cut_left=first > 0)
    before = ELLIPSIS if first + left > 0 else ""
    after = ELLIPSIS if first + right < len(line) else ""
    caret = len(before) + sum(sizes[left : start - first])
    length = sum(sizes[start - first : min(end - first, right)])
    return View(before + "".join(shown[left:right]) + after, caret, max(length, 1))


def _window(sizes: list[int], start: int, end: int, width: int, *, cut_left: bool) -> tuple[int, int]:
    """Which characters to show: the first ones if enough of the mark is among them, else those around it."""
    room = width - len(ELLIPSIS)
    if not cut_left and sum(sizes) <= width:
        return 0, len(sizes)
    left = 0
    in_sight = sum(sizes[:end]) <= room or sum(sizes[:start]) <= room // 2
    if cut_left or not in_sight:
        room -= len(ELLIPSIS)
        spare = max(room - sum(sizes[start:end]), room // 4) // 2
        left = start
        while left > 0 and sizes[left - 1] <= spare:
            left -= 1
            spare -= sizes[left]
    right = left
    while right < len(sizes) and sizes[right] <= room:
        room -= sizes[right]
        right += 1
    return left, right
