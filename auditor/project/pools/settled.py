"""Deliveries that are settled one way or the other: `ack(lease)` says that it is done, `nack(lease)` puts it
back."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import LENDING, Half, Pair, acquiring_half
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import changes_state, own_parameters
from auditor.protocols.vocabulary import SETTLING, Name, split, take_apart

DONE = frozenset({"ack", "acknowledge", "complete", "confirm", "commit", "done", "finish", "settle"})
PUT_BACK = frozenset(
    {"nack", "reject", "requeue", "fail", "retry", "abandon", "return", "release", "unlease"}
)

RESERVING = frozenset({"reserve", "claim", "hold", "earmark"})
"""What is taken by these may become final instead of going back."""


def settled_pairs(cls: Class, methods: list[Function], paired: set[Function]) -> Iterator[Pair]:
    """Who takes out of what is put back is owed one of the two by whoever it hands the thing to."""
    done = [method for method in methods if _is_told(method, DONE)]
    back = [method for method in methods if _is_told(method, PUT_BACK) and done]
    back = [m for m in back if any(own_parameters(m)[:1] == own_parameters(d)[:1] for d in done)]
    stores = {put.field for m in back for put in field_work(m).put if field_work(m).is_from_told(put.thing)}
    acquiring, releasing = Name("acquire", frozenset()), Name("release", frozenset())
    for taker in methods if stores else ():
        taken = {id(node) for field, node in field_work(taker).taken if field in stores}
        if taker in (*done, *back, *paired) or LENDING & set(taker.decorators):
            continue
        half = (
            acquiring_half(taker, acquiring, back, shaped=True)
            if field_work(taker).hands_out(taken)
            else None
        )
        if half is not None:
            yield Pair(cls.name, cls, (half,), tuple(Half(each, releasing) for each in (*back, *done)))


def settling(acquiring: tuple[Half, ...], functions: list[Function]) -> Iterator[Half]:
    """`commit(ticket)` beside `cancel(ticket)`: what was reserved is used up, and nobody owes it any more."""
    reserving = [half for half in acquiring if not RESERVING.isdisjoint(split(half.function.name))]
    for function in functions if reserving else ():
        name = take_apart(function.name, SETTLING)
        if name is None or not own_parameters(function) or not changes_state(function):
            continue
        half = next(
            (h for h in reserving if not name.affix or not h.name.affix or name.affix & h.name.affix), None
        )
        if half is not None:
            yield Half(function, name, half.handle)


def with_those_that_are_done(pair: Pair, methods: Sequence[Function]) -> Pair:
    """With `ack(lease)`, which strikes off what the pair's halves note and strike off, and keeps nothing:
    what was lent has been used up, and nobody is left who could give it back."""
    lending = [half for half in pair.acquires if half.handle is Handle.RESULT]
    like = next((half for half in pair.releases if half.handle is Handle.RESULT), None)
    noted = {put.field for half in lending for put in field_work(half.function).put}
    if like is None or not (noted := noted & _struck_off(like.function)):
        return pair
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    done = [each for each in methods if each not in known and _is_told(each, DONE | SETTLING)]
    ends = [each for each in done if noted & _struck_off(each) and not field_work(each).put]
    found = [replace(like, function=each, argument=0) for each in ends if len(own_parameters(each)) == 1]
    return replace(pair, releases=(*pair.releases, *found)) if found else pair


def _struck_off(method: Function) -> set[str]:
    """Fields out of which goes what it is told."""
    work = field_work(method)
    return {name for name, key in work.removed if work.is_from_told(key)}


def _is_told(method: Function, verbs: frozenset[str]) -> bool:
    return not verbs.isdisjoint(split(method.name)[:1]) and bool(own_parameters(method))
