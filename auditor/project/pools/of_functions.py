"""Pools that functions of a module work on, without a class: `rent_tile(pool)`, `unrent_tile(pool, tile)`."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.markings import FREE
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import ends, singular, split


def as_methods(plain: Iterable[Function]) -> Iterator[Function]:
    """Functions of which one, by its name, undoes another, and which are told the same thing first, as
    methods of that."""
    told = [function for function in plain if function.parameters]
    for one in told:
        if any(_work_together(one, other) or _work_together(other, one) for other in told):
            yield replace(one, of_first=True, field_work=None)


def _work_together(taker: Function, giver: Function) -> bool:
    return taker.parameters[0] == giver.parameters[0] and ends(giver.name, taker.name)


def has_opposite(function: Function, plain: list[Function]) -> bool:
    """Functions of a module have only names to say that they are about the same thing: one undoes the other,
    or they are called after it, `fetch_frame` and `stash_frame`, `ws_get` and `ws_put`, or what they work on
    is called free."""
    return _is_called_like(function, plain) or _works_on_free(function)


def _works_on_free(function: Function) -> bool:
    work = field_work(function)
    names = (*dict(work.taken), *(put.field for put in work.put))
    return any(not FREE.isdisjoint(split(name)) for name in names)


def _is_called_like(function: Function, plain: list[Function]) -> bool:
    words = split(function.name)
    about, before = {singular(word) for word in words[1:]}, words[:-1]
    return any(
        ends(function.name, other.name)
        or ends(other.name, function.name)
        or (before and before == split(other.name)[:-1])
        or not about.isdisjoint(singular(word) for word in split(other.name)[1:])
        for other in plain
        if other is not function
    )


def as_functions(pair: Pair, plain: Iterable[Function]) -> Pair:
    """The pair with the functions themselves for halves: what they are told is known by its name."""
    themselves = {function.qualname: function for function in plain}
    acquires, releases = (
        tuple(_as_function(half, themselves[half.function.qualname]) for half in side)
        for side in (pair.acquires, pair.releases)
    )
    return replace(pair, acquires=acquires, releases=releases)


def _as_function(half: Half, function: Function) -> Half:
    argument, told = half.argument, own_parameters(half.function)
    if isinstance(argument, int) and half.handle is not Handle.RECEIVER and argument < len(told):
        argument = told[argument]
    return replace(half, function=function, argument=argument)
