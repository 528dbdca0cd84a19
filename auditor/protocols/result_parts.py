"""Calls of the standard library that return the handle beside something else: which item is it."""

from collections.abc import Iterable

from auditor.ir.ops import Path

FIRST = frozenset({"tempfile.mkstemp", "mkstemp"})
"""`mkstemp` returns a descriptor and a path: whoever has the path has not the descriptor."""


FIRST_OF_TWO: Path = ("[0]",)


def part_of_result(names: Iterable[str], text: str, arguments: int) -> Path:
    """Where in the result the handle lies; `()` where it is the result.

    `accept()` of a socket returns the socket and an address."""
    accepts = arguments == 0 and text.rpartition(".")[2] == "accept"
    return FIRST_OF_TWO if accepts or not FIRST.isdisjoint((*names, text)) else ()
