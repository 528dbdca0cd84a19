"""Methods that end what a pool lent instead of taking it back: `scrap(wire)` closes a broken one and counts
down what `pick()` counts up, so that another one may be made."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Pair
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters


def with_those_that_throw_away(pair: Pair, methods: Sequence[Function]) -> Pair:
    """With those methods among the ends of the pair."""
    lending = [half for half in pair.acquires if half.handle is Handle.RESULT]
    counted = {name for half in lending for name in _counted(half.function, up=True)}
    like = next((half for half in pair.releases if half.handle is Handle.RESULT), None)
    if not counted or like is None:
        return pair
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    ends = (method for method in methods if method not in known)
    found = [replace(like, function=end, argument=0) for end in ends if _throws_away(end, counted)]
    return replace(pair, releases=(*pair.releases, *found))


def _throws_away(method: Function, counted: set[str]) -> bool:
    """It is told one thing, does something with that, and counts down; it keeps nothing."""
    told = own_parameters(method)
    if len(told) != 1 or method.name.startswith("_") or field_work(method).put:
        return False
    worked_with = any(
        isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == told[0]
        for call in method.calls
    )
    return worked_with and bool(counted & set(_counted(method, up=False)))


def _counted(method: Function, *, up: bool) -> Iterator[str]:
    return (name for name, way in field_work(method).counted if (way > 0) is up)
