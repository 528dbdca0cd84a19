"""Several leases of one function, in a list of its own, that a loop gives back one by one, and leaves before
it is through: `for lease in leases: if failed(lease): pool.put(lease); return False; pool.put(lease)`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import statements_below, walk

AROUND = frozenset({"list", "enumerate", "zip", "reversed", "sorted", "tuple"})
LOOPS = (ast.For, ast.AsyncFor, ast.While)
TAKING = frozenset({"pop", "popleft"})


def stopped_early(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.Return | ast.Break]:
    """The ways out of such a loop, where nothing but the loop speaks of the list behind it."""
    name = listed_in(function, call)
    loops = [node for node in function.statements if isinstance(node, LOOPS) and _is_over(node, name)]
    ending = [loop for loop in loops if _ends(loop, name, ends)]
    if not name or len(ending) != 1 or _tries(function, ending[0]):
        return
    (loop,) = ending
    inside = {id(node) for each in loop.body for node in walk(each)}
    taking = {id(part) for node in _takes(loop, name) for part in walk(node.value)}
    if any(_speaks(node, name) for node in function.nodes if id(node) in inside - taking):
        return
    beside = taking.union(*({id(node) for node in walk(_over(each))} for each in loops))
    made = {id(node) for node in function.nodes if getattr(node, "lineno", 0) <= call.lineno}
    others = (n for n in function.nodes if id(n) not in beside | made)
    if any(_speaks(node, name) for node in others):
        return
    within = {id(node) for each in loop.body if isinstance(each, LOOPS) for node in walk(each)}
    for node in statements_below(loop):
        way_out = isinstance(node, ast.Return) or (isinstance(node, ast.Break) and id(node) not in within)
        if way_out and isinstance(node, ast.Return | ast.Break) and id(node) in inside:
            yield node


def listed_in(function: Function, call: ast.Call) -> str:
    """`leases` of `leases = [pool.take() for _ in pages]`, and of `leases = pool.take_all(pages)`."""
    for target, value in assignments(function):
        value = value.value if isinstance(value, ast.Await) else value
        made = isinstance(value, ast.ListComp | ast.DictComp | ast.SetComp) and _yields(value, call)
        if (made or value is call) and isinstance(target, ast.Name):
            return target.id
    return ""


def _yields(made: ast.ListComp | ast.DictComp | ast.SetComp, call: ast.Call) -> bool:
    return (made.value if isinstance(made, ast.DictComp) else made.elt) is call


def _over(loop: ast.stmt) -> ast.expr:
    assert isinstance(loop, LOOPS)
    return loop.test if isinstance(loop, ast.While) else loop.iter


def _is_over(loop: ast.stmt, name: str) -> bool:
    """`for lease in leases:`, `while leases: lease = leases.pop()`"""
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Name) and loop.test.id == name
    return _goes_over(_over(loop), name)


def _goes_over(over: ast.expr, name: str) -> bool:
    match over:
        case ast.Name(id=each):
            return each == name
        case ast.Call(func=ast.Attribute(value=whole, attr="values" | "items"), args=[]):
            return _goes_over(whole, name)
        case ast.Call(func=ast.Name(id=around), args=[*parts]) if around in AROUND:
            return any(_goes_over(each, name) for each in parts)
    return False


def _takes(loop: ast.stmt, name: str) -> Iterator[ast.Assign]:
    """`lease = leases.pop()`, once in each turn."""
    for node in loop.body if isinstance(loop, ast.While) else ():
        match node:
            case ast.Assign(value=ast.Call(func=ast.Attribute(value=ast.Name(id=each), attr=way))) if (
                each == name and way in TAKING
            ):
                yield node


def _each(loop: ast.stmt, name: str) -> list[ast.expr]:
    """What one entry is called."""
    if isinstance(loop, ast.For | ast.AsyncFor):
        return [loop.target]
    return [target for taking in _takes(loop, name) for target in taking.targets]


def _ends(loop: ast.stmt, name: str, ends: Set[str]) -> bool:
    """Each entry that it comes to, by the last statement of a turn."""
    assert isinstance(loop, LOOPS)
    names = {node.id for each in _each(loop, name) for node in walk(each) if isinstance(node, ast.Name)}
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
