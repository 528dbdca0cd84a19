"""Pairs of which the first half changes nothing that the second one undoes, told by what they are called, or
by what is shown and set, and by their users, who tell the second what the first has returned."""

import re
from collections.abc import Iterator, Sequence

from auditor.flow.effects import Handle, Value
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import returns_something
from auditor.project.pools.halves import STRONG, Half, Pair
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.used_together import asked_in_turn, told_of
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.positions import positions
from auditor.protocols.vocabulary import RELEASE_WORDS, Name, pairs_with, take_apart

ACQUIRING = Name("acquire", frozenset())
RELEASING = Name("release", frozenset())

ACK = re.compile(r"(?:ack|acknowledge|acked)(?:_|$)")
"""Names of what says that a message has been read."""


def called_so(
    model: ClassModel, name: str, cls: Class | None, rest: Sequence[Function], changing: Sequence[Function]
) -> Iterator[Pair]:
    """`acquire_read(number)`, which only shows what `release_read(chunk)` counts down: who filled it has said
    how many there will be."""
    for begins in rest:
        taking = take_apart(begins.name, STRONG)
        if taking is None or cls is None or not returns_something(begins):
            continue
        ends = [
            each
            for each in changing
            if each is not begins
            and own_parameters(each)
            and (giving := take_apart(each.name, RELEASE_WORDS)) is not None
            and pairs_with(taking, giving)
            and taking.affix == giving.affix
            and asked_in_turn(model, begins, each)
        ]
        yield from _told_what_it_returned(model, name, cls, begins, ends)


def told_back(
    model: ClassModel, name: str, cls: Class | None, rest: Sequence[Function], changing: Sequence[Function]
) -> Iterator[Pair]:
    """`open_cell(reader)` moves on a cursor and returns a cell, and more than one of its users tells it to
    `ack(cell)`: what the one does to the ring says nothing of the other, and what they are called does."""
    for begins in rest:
        if cls is None or not returns_something(begins) or take_apart(begins.name, RELEASE_WORDS) is not None:
            continue
        told_there = {*own_parameters(begins)}  # `run, rest = runs.cut(run, n)`
        ends = [
            each
            for each in changing
            if each is not begins
            and _is_called_an_end(each)
            and told_there.isdisjoint(own_parameters(each)[:1])
            and asked_in_turn(model, begins, each, at_least=2)
        ]
        yield from _told_what_it_returned(model, name, cls, begins, ends)


def gone_back_to(
    model: ClassModel, name: str, cls: Class | None, halves: Sequence[Function]
) -> Iterator[Pair]:
    """`mark = arena.mark()`, and `arena.rewind(mark)` gives back what was carved since."""
    for begins, ends in positions(halves) if cls is not None else ():
        if asked_in_turn(model, begins, ends):
            yield from _told_what_it_returned(model, name, cls, begins, [ends], Value.OBJECT)


def _told_what_it_returned(
    model: ClassModel,
    name: str,
    cls: Class | None,
    begins: Function,
    ends: Sequence[Function],
    value: Value | None = None,
) -> Iterator[Pair]:
    told = [told_of(model, begins, each) for each in ends]
    if ends and all(each is not None and each.handle is Handle.RESULT for each in told):
        half = Half(begins, ACQUIRING, value=value or value_of(begins), by_shape=True)
        back = (Half(each, RELEASING, argument=way.end) for each, way in zip(ends, told, strict=True) if way)
        yield Pair(f"{name}.{begins.name}()", cls, (half,), tuple(back), proposed=True)


def _is_called_an_end(method: Function) -> bool:
    told = bool(own_parameters(method))
    return told and (ACK.match(method.name) is not None or take_apart(method.name, RELEASE_WORDS) is not None)
