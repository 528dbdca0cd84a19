"""Deliveries that are settled one way or the other: `ack(lease)` says that it is done, `nack(lease)` puts it
back."""

from collections.abc import Iterator

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


def _is_told(method: Function, verbs: frozenset[str]) -> bool:
    return not verbs.isdisjoint(split(method.name)[:1]) and bool(own_parameters(method))
