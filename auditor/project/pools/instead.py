"""Methods to which a pool's release hands on what it is told, instead of putting it back: `give_back(worker)`
calls `self.replace(worker)` for one that has died. Whoever calls that himself has given it back, too."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.pool_state import own_parameters


def with_others(pair: Pair, methods: Sequence[Function]) -> Pair:
    """With those methods among the ends of the pair."""
    known = {half.function for half in (*pair.acquires, *pair.releases)}
    others = {
        method: replace(half, function=method, argument=0)
        for half in pair.releases
        for method in (_instead(half, methods) if half.handle is Handle.RESULT else ())
        if method not in known
    }
    return replace(pair, releases=(*pair.releases, *others.values())) if others else pair


def _instead(half: Half, methods: Sequence[Function]) -> Iterator[Function]:
    told = own_parameters(half.function)
    told = (half.argument,) if isinstance(half.argument, str) else told[:1]
    for node in half.function.statements:
        for branch in (node.body, node.orelse) if isinstance(node, ast.If) else ():
            name = _handed_to(branch, half.function.owner or "", told)
            yield from (method for method in methods if method.name == name and own_parameters(method))


def _handed_to(branch: Sequence[ast.stmt], own: str, told: Sequence[str]) -> str:
    """The only thing that is done there; helpers of the class are nobody else's to call."""
    match branch:
        case [ast.Expr(value=ast.Call() as call)] | [
            ast.Expr(value=ast.Call() as call),
            ast.Return(value=None),
        ]:
            pass
        case [ast.Return(value=ast.Call() as call)]:
            pass
        case _:
            return ""
    name = own_attribute(call.func, own) or ""
    given = [each.id for each in call.args if isinstance(each, ast.Name)]
    return name if given == list(told) and not name.startswith("_") else ""
