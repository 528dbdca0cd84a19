"""Several leases of one function, in a list of its own, that a loop gives back one by one, and leaves before
it is through: `for lease in leases: if failed(lease): pool.put(lease); return False; pool.put(lease)`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import statements_below, walk

AROUND = frozenset({"list", "enumerate", "zip", "reversed", "sorted", "tuple"})
LOOPS = (ast.For, ast.AsyncFor)


def stopped_early(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.Return]:
    """The returns within such a loop, where nothing but the loop speaks of the list behind it."""
    name = _listed_in(function, call)
    loops = [node for node in function.statements if isinstance(node, LOOPS) and _is_over(node.iter, name)]
    ending = [loop for loop in loops if _ends(loop, ends)]
    if not name or len(ending) != 1 or _tries(function, ending[0]):
        return
    (loop,) = ending
    inside = {id(node) for each in loop.body for node in walk(each)}
    if any(_speaks(node, name) for node in function.nodes if id(node) in inside):
        return
    beside = {id(node) for each in loops for node in walk(each.iter)}
    made = {id(node) for node in function.nodes if getattr(node, "lineno", 0) <= call.lineno}
    others = (n for n in function.nodes if id(n) not in beside | made)
    if any(_speaks(node, name) for node in others):
        return
    for node in statements_below(loop):
        if isinstance(node, ast.Return) and id(node) in inside:
            yield node


def _listed_in(function: Function, call: ast.Call) -> str:
    """`leases` of `leases = [pool.take() for _ in pages]`."""
    for target, value in assignments(function):
        made = isinstance(value, ast.ListComp | ast.DictComp | ast.SetComp) and _yields(value, call)
        if made and isinstance(target, ast.Name):
            return target.id
    return ""


def _yields(made: ast.ListComp | ast.DictComp | ast.SetComp, call: ast.Call) -> bool:
    return (made.value if isinstance(made, ast.DictComp) else made.elt) is call


def _is_over(over: ast.expr, name: str) -> bool:
    match over:
        case ast.Name(id=each):
            return each == name
        case ast.Call(func=ast.Attribute(value=whole, attr="values" | "items"), args=[]):
            return _is_over(whole, name)
        case ast.Call(func=ast.Name(id=around), args=[*parts]) if around in AROUND:
            return any(_is_over(each, name) for each in parts)
    return False


def _ends(loop: ast.For | ast.AsyncFor, ends: Set[str]) -> bool:
    """Each entry that it comes to, by the last statement of a turn."""
    names = {node.id for node in walk(loop.target) if isinstance(node, ast.Name)}
    return any(
        isinstance(node, ast.Call)
        and last_name(node) in ends
        and any(isinstance(n, ast.Name) and n.id in names for n in walk(node))
        for each in loop.body
        for node in walk(each)
    )


def _tries(function: Function, loop: ast.stmt) -> bool:
    """Whoever leaves the loop comes by a `finally`."""
    tries = (node for node in function.statements if isinstance(node, ast.Try) and node.finalbody)
    return any(node is loop for each in tries for part in each.body for node in walk(part))


def _speaks(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
