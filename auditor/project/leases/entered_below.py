"""Leases that their pool itself puts below another one: `child = grove.sprout(token, root)`, of which
`root.children` has it, goes when the root does."""

import ast
from collections.abc import Iterable, Iterator

from auditor.project.code.modules import Function
from auditor.project.shapes.pool_state import own_parameters

PUTTING = frozenset({"append", "add", "insert"})


def entered_below(call: ast.Call, takers: Iterable[Function]) -> bool:
    """Whether the call names, by a local name, what its pool puts the new one below."""
    return any(
        isinstance(given, ast.Name)
        for taker in takers
        for name in _below(taker)
        for given in _given_for(name, taker, call)
    )


def _below(taker: Function) -> Iterator[str]:
    """Parameters in, or under, which it puts what it returns; a plain function is told its pool first."""
    told = set(own_parameters(taker)[taker.cls is None :])
    returned = {
        node.value.id
        for node in taker.statements
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    for each in taker.calls if returned - told else ():
        match each:
            case ast.Call(func=ast.Attribute(value=place, attr=way), args=[*_, ast.Name(id=put)]):
                if way in PUTTING and put in returned - told:
                    yield from told & {_whose(place)}


def _whose(place: ast.expr) -> str:
    """`parent` of `parent.kids` and of `self.nodes[parent].kids`, and of no `self.rows[parent]`."""
    match place:
        case ast.Attribute(value=ast.Name(id=name) | ast.Subscript(slice=ast.Name(id=name))):
            return name
    return ""


def _given_for(name: str, taker: Function, call: ast.Call) -> Iterator[ast.expr]:
    at = own_parameters(taker).index(name)
    yield from call.args[at : at + 1]
    yield from (each.value for each in call.keywords if each.arg == name)
