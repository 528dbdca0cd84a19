"""Methods that end what a pool lent instead of taking it back: `scrap(wire)` closes a broken one and counts
down what `pick()` counts up, or gives back the permit that it takes, so that another one may be made."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Pair
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.use_counts import semaphores
from auditor.source.nodes import statements_below


def with_those_that_throw_away(pair: Pair, methods: Sequence[Function]) -> Pair:
    """With those methods among the ends of the pair."""
    lending = [half for half in pair.acquires if half.handle is Handle.RESULT]
    counted = {name for half in lending for name in _taken(half.function)}
    like = next((half for half in pair.releases if half.handle is Handle.RESULT), None)
    if not counted or like is None:
        return pair
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    ends = (method for method in methods if method not in known)
    found = [replace(like, function=end, argument=0) for end in ends if _throws_away(end, counted)]
    return replace(pair, releases=(*pair.releases, *found))


def _throws_away(method: Function, counted: set[str]) -> bool:
    """It is told one thing, does something with that or deletes its name, and counts down."""
    told = own_parameters(method)
    if len(told) != 1 or method.name.startswith("_") or field_work(method).put:
        return False
    worked_with = any(
        isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == told[0]
        for call in method.calls
    )
    deleted = any(
        isinstance(node, ast.Delete) and any(getattr(each, "id", "") == told[0] for each in node.targets)
        for node in statements_below(method.node)
    )
    return (worked_with or deleted) and not counted.isdisjoint(_given_back(method))


def _taken(method: Function) -> Iterator[str]:
    """What it counts up, and semaphores of which it takes a permit."""
    yield from (name for name, way in field_work(method).counted if way > 0)
    yield from _permits(method, ast.Sub)


def _given_back(method: Function) -> Iterator[str]:
    yield from (name for name, way in field_work(method).counted if way < 0)
    yield from _permits(method, ast.Add)


def _permits(method: Function, way: type[ast.operator]) -> Iterator[str]:
    own = method.owner or ""
    for field, op in semaphores(method):
        if isinstance(op, way) and (name := own_attribute(field, own)) is not None:
            yield name
