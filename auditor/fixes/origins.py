"""Where the exceptions come from that lose a lease: the statements that a rollback has to stand around."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from auditor.facts import EXCEPTIONAL, LEAVING, Leak, Loss
from auditor.fixes.life import Life, block_of, statements_in

RAISING = ("may raise", "raises here", "may raise here", "may be cancelled here", "may be closed here")
"""How the notes of a trace end where an exception sets out."""


@dataclass(frozen=True, slots=True)
class Origins:
    """The lines from which the lease is lost by an exception; `caught`: a handler takes it, and leaves."""

    lines: tuple[int, ...]
    caught: bool


def origins_of(leaks: Sequence[Leak], *, calls: bool = False) -> Origins | None:
    """None if the lease is also lost without an exception.

    A `raise` or `assert` that leaves the function is an origin; with `calls` a call that raises is one, too.
    Where a handler takes the exception and then leaves, any call before the hand-over may have sent it there,
    and all of them count.
    """
    counted = EXCEPTIONAL if calls else {Loss.RAISE}
    own = [leak for leak in leaks if leak.loss in counted or leak.loss in LEAVING]
    begun = [_first_raise(leak) for leak in own]
    if not own or None in begun:
        return None
    caught = any(line != leak.at.line for leak, line in zip(own, begun, strict=True))
    if caught:
        begun += [_first_raise(leak) for leak in leaks if leak.loss in EXCEPTIONAL]
    return Origins(tuple(sorted({line for line in begun if line is not None})), caught)


def _first_raise(leak: Leak) -> int | None:
    return next((step.line for step in leak.trace if step.note.endswith(RAISING)), None)


def innermost(life: Life, line: int) -> ast.stmt | None:
    """The simple statement, or the head of the compound one, that covers the line."""
    covering = [each for each in statements_in(life.function.body) if _covers(each, line)]
    return covering[-1] if covering else None


def stretch(block: Sequence[ast.stmt], lines: Iterable[int]) -> list[ast.stmt]:
    """The statements of a block from the first to the last that one of the lines is in."""
    wanted = list(lines)
    places = [index for index, each in enumerate(block) if any(_covers(each, line) for line in wanted)]
    return list(block[places[0] : places[-1] + 1]) if places else []


def by_block(life: Life, statements: Iterable[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The statements in groups of the same block, each group with all that stands between its members."""
    groups: dict[int, tuple[Sequence[ast.stmt], list[ast.stmt]]] = {}
    for each in statements:
        block = block_of(life.file, each)
        groups.setdefault(id(block), (block, []))[1].append(each)
    for block, members in groups.values():
        if block:
            places = sorted(list(block).index(each) for each in members)
            yield list(block[places[0] : places[-1] + 1])


def _covers(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)
