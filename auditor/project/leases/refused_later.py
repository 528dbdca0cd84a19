"""What former turns of a loop have taken when a later one is refused:

    for p in params:
        if not p.gather():
            return False
    return True

Whoever is told no believes that he has nothing. Nothing is noted in a turn, and neither this function nor one
that calls it gives anything back."""

import ast
from collections.abc import Iterator, Set

from auditor.ir.calls import LOGGING
from auditor.project.code.answers import NOTHING
from auditor.project.code.bindings import root_of
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.code.release_names import is_an_end
from auditor.project.fields.filling_again import names_in
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import walk

EMPTY = frozenset({"{}", "[], []"})


def refused_later(function: Function, calls: Calls, acquire: ast.Call, ends: Set[str]) -> ast.Return | None:
    """The way out on which a later turn is refused."""
    loop = _loop_around(function, acquire)
    if loop is None or any(is_an_end(call, ends) for call in function.calls):
        return None
    if function.owner in names_in(loop.iter):
        return None  # the object knows what it has, and whoever closes it gives that back
    answers = [node for node in function.statements if isinstance(node, ast.Return)]
    refused = _refusal(loop, acquire)
    if refused is None or all(_text(each) == _text(refused) for each in answers):
        return None
    if _notes(function, loop) or any(_undoes(each, ends) for each in _callers(calls, function)):
        return None
    return refused


def _loop_around(function: Function, acquire: ast.Call) -> ast.For | None:
    """The one loop, with an element for each turn."""
    loops = [
        node
        for node in function.statements
        if isinstance(node, ast.For | ast.AsyncFor | ast.While)
        and any(inner is acquire for each in node.body for inner in walk(each))
    ]
    return loops[0] if len(loops) == 1 and isinstance(loops[0], ast.For) else None


def _refusal(loop: ast.For, acquire: ast.Call) -> ast.Return | None:
    for node in loop.body:
        match node:
            case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=asked), body=[*before, ast.Return() as last]):
                asked = asked.value if isinstance(asked, ast.Await) else asked
                said = _text(last) in NOTHING | EMPTY and all(map(_only_counts, before))
                if asked is acquire and said:
                    return last
    return None


def _only_counts(statement: ast.stmt) -> bool:
    """`self.refused += 1`, `logger.info(...)`: nothing is undone."""
    calls = [node for node in walk(statement) if isinstance(node, ast.Call)]
    return isinstance(statement, ast.Expr | ast.AugAssign) and all(
        last_name(each) in LOGGING for each in calls
    )


def _text(node: ast.Return) -> str:
    return ast.unparse(node.value) if node.value is not None else "None"


def _notes(function: Function, loop: ast.For) -> bool:
    """A turn puts something into an object that others know."""
    known = {function.owner, *function.parameters, *names_in(loop.target)}
    for node in (node for each in loop.body for node in walk(each)):
        match node:
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                if root_of(node) in known:
                    return True
            case ast.Call(func=ast.Attribute(value=filled, attr=name)):
                if name in FILLING and root_of(filled) in known:
                    return True
    return False


def _callers(calls: Calls, function: Function) -> Iterator[Function]:
    project = calls.model.project
    for path, _ in project.mentioning(f"{function.name}("):
        module = project.module(path)
        for each in list(module.by_node.values()) if module is not None else ():
            if each.qualname != "<module>" and any(last_name(call) == function.name for call in each.calls):
                yield each


def _undoes(caller: Function, ends: Set[str]) -> bool:
    return any(is_an_end(call, ends) for call in caller.calls)
