"""Objects in a container that a method goes over, and to each of which it gives a lease. Another method that
does so passes over those that have one already."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import own_attribute, suites_of
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, attributes_in, before, fillings, names_in, tests_in
from auditor.project.fields.reckoning import lent_alike, takes_out
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor)
AROUND = frozenset({"list", "tuple", "sorted", "reversed"})


def filled_where_others_pass_over(
    filling: Filling, call: ast.Call, family: Sequence[Function], enders: Sequence[Function]
) -> bool:
    """Nobody of the class calls the method, as whoever has just filled the container would, and none of those
    who end what is there leaves the items where they are."""
    container = items_of(filling.method, filling.owner)
    if any(last_name(each) == filling.method.name for method in family for each in method.calls):
        return False
    if any(_ends_in_place(ender, container, filling.field) for ender in enders if ender in family):
        return False
    return any(
        _passes_over(method, container, filling, call) for method in family if method is not filling.method
    )


def _ends_in_place(ender: Function, container: str, field: str) -> bool:
    """The items stay there without a lease."""
    own = ender.owner or ""
    over = [loop for loop in _loops(ender) if _container(loop, own) == container]
    if any(fillings(ender, getattr(loop.target, "id", ""), field) for loop in over):
        return False  # they get another one
    cleared = any(_clears(call, own, container) for call in ender.calls)
    return bool(over) and not (cleared or takes_out(ender, container))


def _clears(call: ast.Call, own: str, container: str) -> bool:
    match call.func:
        case ast.Attribute(value=cleared, attr="clear" | "popleft"):
            return own_attribute(cleared, own) == container
    return False


def in_items(filling: Filling) -> bool:
    """`item.row = rows.take()` in `for item in self.items:`."""
    return filling.key is None and bool(items_of(filling.method, filling.owner))


def filled_in_each_round(filling: Filling) -> bool:
    """`for _ in range(rounds): for size in sizes: self.graphs[size] = ...`: the same keys over again, where a
    round does nothing else with the table, and what is done in it does not depend on the round."""
    around = [loop for loop in _loops(filling.method) if any(n is filling.statement for n in walk(loop))]
    if len(around) < 2 or filling.key is None or filling.owner != filling.method.owner:
        return False
    rounds, inner = around[0], around[-1]
    own = names_in(inner.target)
    turn = names_in(rounds.target)
    inside = {id(part) for part in walk(inner)}
    outside = [n for n in walk(rounds) if id(n) not in inside]
    others = [n for n in outside if isinstance(n, ast.expr)]
    turn |= {n.id for n in others if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    changed = {n.id for n in walk(rounds) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    last = any(isinstance(n, ast.Break | ast.Return) and n.lineno > inner.lineno for n in outside)
    return (
        bool(names_in(filling.key) & own)
        and not last
        and not _is_asked_for(inner.iter)
        and names_in(filling.key).isdisjoint(changed - own)
        and turn.isdisjoint(names_in(inner))
        and not any(own_attribute(n, filling.owner) == filling.field for n in others)
    )


def tries_until_it_is(filling: Filling) -> bool:
    """`for _ in range(tries):` around a store after which it leaves: what a `join_retry()` does again is in
    its own loop, and stores once."""
    around = [loop for loop in _loops(filling.method) if any(n is filling.statement for n in walk(loop))]
    suites = (suite for suite in suites_of(filling.method.node) if filling.statement in suite)
    leaves = any(isinstance(suite[-1], ast.Return | ast.Break) for suite in suites)
    counted = [loop for loop in around if names_in(loop.iter) <= {"range", *filling.method.parameters[1:]}]
    return "retry" in split(filling.method.name) and bool(counted) and leaves


def _is_asked_for(over: ast.expr) -> bool:
    """`self.queue.drain()`, which may answer with other ones in each round."""
    calls = [node.func for node in walk(over) if isinstance(node, ast.Call)]
    known = AROUND | {"range", "enumerate", "zip", "reversed", "len", "values", "items", "keys"}
    return any(getattr(func, "id", getattr(func, "attr", "")) not in known for func in calls)


def items_of(method: Function, name: str) -> str:
    """`items` of `for name in self.items:`, where that is never another thing."""
    named = [node for node in method.nodes if isinstance(node, ast.Name) and node.id == name]
    bound = [node for node in named if isinstance(node.ctx, ast.Store)]
    loops = [loop for loop in _loops(method) if getattr(loop.target, "id", "") == name]
    return _container(loops[0], method.owner or "") if len(bound) == len(loops) == 1 else ""


def _loops(method: Function) -> list[ast.For | ast.AsyncFor]:
    return [node for node in method.statements if isinstance(node, LOOPS)]


def _container(loop: ast.For | ast.AsyncFor, own: str) -> str:
    """`self.items`, `list(self.items)`, `self.items.values()`."""
    over: ast.expr = loop.iter
    while isinstance(over, ast.Call):
        match over:
            case ast.Call(func=ast.Name(id=name), args=[inner]) if name in AROUND:
                over = inner
            case ast.Call(func=ast.Attribute(value=inner, attr="values"), args=[]):
                over = inner
            case _:
                return ""
    return own_attribute(over, own) or ""


def _passes_over(method: Function, container: str, filling: Filling, call: ast.Call) -> bool:
    """`if item.row is not None: continue` before another one is put there."""
    for loop in _loops(method):
        owner = getattr(loop.target, "id", "")
        if not owner or _container(loop, method.owner or "") != container:
            continue
        for other in fillings(method, owner, filling.field):
            asked = (node for test in tests_in(list(before(other))) for node in attributes_in(test))
            if lent_alike(other, call) and any(own_attribute(n, owner) == filling.field for n in asked):
                return True
    return False
