"""Calls of the standard library that return the handle beside something else: which item is it."""

from collections.abc import Iterable

from auditor.ir.ops import Path

FIRST = frozenset({"tempfile.mkstemp", "mkstemp"})
"""`mkstemp` returns a descriptor and a path: whoever has the path has not the descriptor."""


SECOND = frozenset({"asyncio.open_connection", "asyncio.open_unix_connection"})
"""A reader and a writer, by which alone the connection is closed."""

TRANSPORT = ".transport"
"""Of a writer: to close it is to close the connection, too."""

FIRST_OF_TWO: Path = ("[0]",)
SECOND_OF_TWO: Path = ("[1]",)


def part_of_result(names: Iterable[str], text: str, arguments: int) -> Path:
    """Where in the result the handle lies; `()` where it is the result.

    `accept()` of a socket returns the socket and an address."""
    if not SECOND.isdisjoint((*names, text)):
        return SECOND_OF_TWO
    accepts = arguments == 0 and text.rpartition(".")[2] == "accept"
    return FIRST_OF_TWO if accepts or not FIRST.isdisjoint((*names, text)) else ()


def same_as(part: Path) -> tuple[Path, ...]:
    """Other places in the result by which it is ended as well."""
    return ((*part, TRANSPORT),) if part == SECOND_OF_TWO else ()
