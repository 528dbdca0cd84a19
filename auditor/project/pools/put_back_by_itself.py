"""Objects whose class has a stock of them, into which each puts itself: `packet = Packet.fresh()`, which pops
one of `cls._bin` or makes one, and `packet.scrap()`, which appends itself there."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import given_to, ways
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.lent_objects import needs_nothing
from auditor.project.shapes.changes import Did, changes
from auditor.project.shapes.field_work import field_work
from auditor.protocols.vocabulary import Name

MAKING = frozenset({"classmethod", "staticmethod"})


def put_back_by_themselves(cls: Class, methods: list[Function], paired: Set[Function]) -> Iterator[Pair]:
    """Of methods of the class itself that hand out what they take from its stock."""
    for taker in methods:
        if taker in paired or MAKING.isdisjoint(taker.decorators):
            continue
        stocks = {name for name, _ in field_work(taker).taken}
        ends = (
            [each for each in methods if stocks and _puts_itself(each, stocks)] if _makes(taker, cls) else []
        )
        if ends:
            half = Half(taker, Name("acquire", frozenset()), by_shape=True)
            back = (Half(end, Name("release", frozenset()), Handle.RECEIVER) for end in ends)
            yield Pair(cls.name, cls, (half,), tuple(back))


def _makes(taker: Function, cls: Class) -> bool:
    """What it hands out is one of its class, if there is none in the stock."""
    returned = [node.value for node in taker.statements if isinstance(node, ast.Return) and node.value]
    given = (each for value in returned if isinstance(value, ast.Name) for each in given_to(taker, value.id))
    return any(
        isinstance(way, ast.Call)
        and isinstance(way.func, ast.Name)
        and way.func.id in (cls.name, taker.owner)
        for value in (*returned, *given)
        for way in ways(value)
    )


def _puts_itself(method: Function, stocks: Set[str]) -> bool:
    if not needs_nothing(method) or not MAKING.isdisjoint(method.decorators):
        return False
    return any(
        change.did is Did.IN
        and change.way[-1] in stocks
        and isinstance(change.value, ast.Name)
        and change.value.id == method.owner
        for change in changes(method)
    )
