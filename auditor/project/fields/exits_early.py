"""`__exit__` that leaves early by something that has nothing to do with what `__enter__` always takes:
`if self.param.frozen: return`, `if not os.path.exists(self.path): return`. It runs once for each `with`."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.entered import ENTERS, EXITS
from auditor.project.code.modules import Function
from auditor.project.fields.exits import PROMISING, begins_always, own_attributes, what_decides
from auditor.project.fields.filling_again import only_logs
from auditor.project.fields.of_the_exception import is_of_the_exception
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


def leaves_early(
    method: Function, begun: Function, call: ast.Call, family: Sequence[Function], field: str
) -> bool:
    """No test reads the field, a promise to keep it, or what a method sets that has to do with it."""
    own = method.owner
    if own is None or method.name not in EXITS or begun.name not in ENTERS:
        return False
    if not begins_always(begun, call, field) or is_under_a_test(begun, call) or is_told_before(method, field):
        return False
    tests = [test for test in what_decides(method, own, field) if not is_of_the_exception(test, method)]
    asked = {name for test in tests for name in own_attributes(test, method, own)}
    words = {word for test in tests for node in walk(test) for word in split(_named(node))}
    others = [each for each in family if each.name != "__init__"]
    if not _tells_of_itself(begun):  # it takes one each time, whatever else it sets
        others = [each for each in others if each is not begun]
    involved = [each for each in others if _speaks_of(each, field)]
    decided = {own_attribute(to, each.owner or "") for each in involved for to, _ in assignments(each)}
    return bool(tests) and field not in asked and not PROMISING & words and decided.isdisjoint(asked)


def _tells_of_itself(begun: Function) -> bool:
    """`self.other.note(self)`: who is told may end what lies there."""
    return any(getattr(each, "id", None) == begun.owner for call in begun.calls for each in call.args)


def is_under_a_test(begun: Function, call: ast.Call) -> bool:
    """`if self.row is None: self.row = pool.take()`"""
    return any(isinstance(node, ast.If) and call in list(walk(node)) for node in begun.statements)


def is_told_before(method: Function, field: str) -> bool:
    """Before it leaves early it hands on what lies there: `self.main.retire_later(self.row); return`."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Return)
        and any(
            getattr(part, "attr", "") == field
            for each in node.body
            if not only_logs(each)
            for part in walk(each)
        )
        for node in method.statements
    )


def _named(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _speaks_of(method: Function, field: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == field for node in method.nodes)
