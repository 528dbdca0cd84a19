"""Methods that put a new lease in the place of one that they have just worked with."""

import ast

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.fields.filling_again import Filling
from auditor.source.nodes import walk


def works_with_the_last(function: Function, attribute: str, line: int) -> bool:
    """`if not self.connection.connected():` above the line that stores another one: there was one. No method
    of it that speaks of an end is called, and no function is given it."""
    own = function.owner
    if own is None:
        return False
    names = {
        target.id
        for node in function.statements
        if isinstance(node, ast.Assign) and own_attribute(node.value, own) == attribute
        for target in node.targets
        if isinstance(target, ast.Name) and node.lineno <= line
    }

    def is_the_last(node: ast.expr) -> bool:
        return own_attribute(node, own) == attribute or getattr(node, "id", None) in names

    used = [
        node
        for node in function.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_the_last(node.value)
    ]
    given = [argument for call in function.calls for argument in _arguments(call) if is_the_last(argument)]
    ended = given or any(ENDING.search(node.attr) for node in used)
    return not ended and any(node.lineno <= line for node in used)


def works_first(filling: Filling) -> bool:
    """`session.worker.generate(text)` above `session.worker = pool.take()`: there was one, and it worked.
    What is only asked, `if session.worker.is_dead():`, may be over."""
    nodes = filling.method.nodes
    tests = [test for node in nodes if isinstance(test := getattr(node, "test", None), ast.AST)]
    asked = {id(inner) for test in tests for inner in walk(test)}
    return filling.key is None and any(
        isinstance(call.func, ast.Attribute)
        and own_attribute(call.func.value, filling.owner) == filling.field
        and not ENDING.search(call.func.attr)
        for call in filling.method.calls
        if call.lineno < filling.line and id(call) not in asked
    )


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def asks_whether_there_is_one(function: Function, attribute: str) -> bool:
    """A test of the field itself, and not of what it says: `if self.connection is None:`."""
    own = function.owner or ""
    for node in function.nodes:
        test = getattr(node, "test", None)
        if isinstance(test, ast.AST):
            inner = [each for each in walk(test) if isinstance(each, ast.Attribute)]
            asked = {id(each) for each in inner if own_attribute(each, own) == attribute}
            if asked - {id(each.value) for each in inner}:
                return True
    return False
