"""Functions made in a loop that give back what its name means when they are called, and by then that is the
last one: `for grad in grads: buffer = pool.get(); send(buffer).then(lambda: pool.put(buffer))`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Function
from auditor.project.meaning.later import WHEN_DONE
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import statements_below, walk

LOOPS = ast.For | ast.AsyncFor | ast.While
KEEPING = frozenset({"append", "callback", "push_async_callback", "register"})


def late_bound(function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.expr]:
    """Those that are told to somebody who calls them later, in the loop in which the call is."""
    for loop in (node for node in function.statements if isinstance(node, LOOPS)):
        name = next((n for each in statements_below(loop) if (n := _bound_by(each, call))), "")
        inside = [n for each in loop.body for n in walk(each)] if name else []
        for node in inside:
            if isinstance(node, ast.Call) and (
                WHEN_DONE.match(last_name(node)) or last_name(node) in KEEPING
            ):
                yield from (told for told in node.args if _gives_back(told, name, ends))


def _bound_by(node: ast.stmt, call: ast.Call) -> str:
    return next((to.id for to, value in assigned_by(node) if value is call and isinstance(to, ast.Name)), "")


def _gives_back(told: ast.expr, name: str, ends: Set[str]) -> bool:
    if not isinstance(told, ast.Lambda):
        return False
    arguments = told.args
    own = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return name not in own and any(
        isinstance(each, ast.Call)
        and last_name(each) in ends
        and any(isinstance(n, ast.Name) and n.id == name for given in each.args for n in walk(given))
        for each in walk(told.body)
    )
