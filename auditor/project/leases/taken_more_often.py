"""What each turn of a loop takes once more, and one call behind it gives back once:

for _ in range(n):
    await self.permits.acquire()
...
self.permits.release()
"""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.modules import Function
from auditor.project.code.release_names import is_an_end
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import bound_by, mentions
from auditor.source.nodes import walk

_APART = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.comprehension,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
)


def given_back_once(function: Function, call: ast.Call, ends: Set[str]) -> ast.Call | None:
    """The only call that ends what this one takes, where all turns take the same."""
    loop = _loop_around(function, call)
    if loop is None or not isinstance(call.func, ast.Attribute):
        return None
    pool, told = ast.unparse(call.func.value), [ast.unparse(each) for each in call.args]
    ending = [
        each
        for each in function.calls
        if is_an_end(each, ends)
        and isinstance(each.func, ast.Attribute)
        and ast.unparse(each.func.value) == pool
    ]
    if len(ending) != 1 or ending[0].keywords or call.keywords:
        return None
    (end,) = ending
    same = [ast.unparse(each) for each in end.args] == told
    behind = (loop.end_lineno or 0) < end.lineno
    named = {last_name(end)} | ends
    handed_on = any(node.attr in named for node in _attributes(function) if node is not end.func)
    return end if same and behind and not handed_on and not _is_apart(function, end) else None


def _loop_around(function: Function, call: ast.Call) -> ast.For | None:
    """Whose turns do nothing but call it, and tell it nothing of which turn it is."""
    for loop in function.statements:
        if not isinstance(loop, ast.For) or loop.orelse or not any(_is_it(each, call) for each in loop.body):
            continue
        turn = frozenset(bound_by(loop.target))
        alone = len(loop.body) == 1  # what else is done in a turn may have each of them
        if alone and not mentions(call, turn, frozenset()) and ast.unparse(loop.iter) != "range(1)":
            return loop
    return None


def _is_it(statement: ast.stmt, call: ast.Call) -> bool:
    """`pool.take()`, or `await pool.take()`."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return (value.value if isinstance(value, ast.Await) else value) is call


def _is_apart(function: Function, end: ast.Call) -> bool:
    """In what may run more often than the function."""
    around = (node for node in function.nodes if node is not function.node and isinstance(node, _APART))
    return any(inner is end for node in around for inner in walk(node))


def _attributes(function: Function) -> Iterator[ast.Attribute]:
    return (node for node in function.nodes if isinstance(node, ast.Attribute))
