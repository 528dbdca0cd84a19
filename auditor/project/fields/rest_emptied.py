"""Lists of records of which a method moves on a part, and then lets go of the rest:

talk.pages.extend(talk.drafted[:accepted])
talk.drafted = []
"""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.cleared_beside_others import empties
from auditor.project.fields.forgetting import for_good
from auditor.project.fields.one_end_forgets import callers
from auditor.source.nodes import walk


def rest_emptied(project: Project, method: Function, field: str, record: str) -> Iterator[ast.stmt]:
    """The statement that empties it, where the method takes one stretch of the list before, speaks of it
    nowhere else, and gives nothing back; nor do its callers, who do not speak of the list either."""
    emptying = [node for node in method.statements if empties(node, record, field)]
    if len(emptying) != 1 or any(map(looks_releasing, method.calls)):
        return
    inside = {id(part) for part in walk(emptying[0])}
    spoken = [
        node
        for node in method.nodes
        if isinstance(node, ast.Attribute) and own_attribute(node, record) == field and id(node) not in inside
    ]
    cut = _stretch_of(method, spoken)
    moved = cut is not None and cut.lineno < emptying[0].lineno and _joins_another(method, cut)
    if cut is None or not moved or _is_all_of_it(method, cut, field) or not for_good(project, method):
        return
    if not any(f".{field}" in caller.text for caller in callers(project, method) if caller is not method):
        yield emptying[0]


def _stretch_of(method: Function, spoken: list[ast.Attribute]) -> ast.Subscript | None:
    """`talk.drafted[:n]`, if that is all that is said of it but whether there is something."""
    asked = {id(part) for node in method.statements if isinstance(node, ast.If) for part in _asked(node.test)}
    read = [node for node in spoken if id(node) not in asked]
    if len(read) != 1:
        return None
    cuts = (node for node in method.nodes if isinstance(node, ast.Subscript) and node.value is read[0])
    return next((node for node in cuts if isinstance(node.slice, ast.Slice)), None)


def _asked(test: ast.expr) -> Iterator[ast.expr]:
    """`if talk.drafted:`, `if not talk.drafted:`"""
    yield test.operand if isinstance(test, ast.UnaryOp) else test


def _joins_another(method: Function, cut: ast.Subscript) -> bool:
    """`others.extend(cut)`, `others += cut`, `self.others = cut`"""
    for node in method.nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="extend" | "extendleft"), args=[part]):
                pass
            case ast.AugAssign(value=part) | ast.Assign(targets=[ast.Attribute()], value=part):
                pass
            case _:
                continue
        if part is cut:
            return True
    return False


def _is_all_of_it(method: Function, cut: ast.Subscript, field: str) -> bool:
    """`[:]`, or up to a mark that was reckoned from how many there are."""
    assert isinstance(cut.slice, ast.Slice)
    marks = [mark for mark in (cut.slice.lower, cut.slice.upper) if mark is not None]
    return not marks or any(_speaks_of(method, mark, field, frozenset()) for mark in marks)


def _speaks_of(method: Function, value: ast.expr, field: str, seen: Set[str]) -> bool:
    """Of the field, or of a name that was reckoned from it."""
    names = {node.id for node in walk(value) if isinstance(node, ast.Name)} - seen
    return any(getattr(node, "attr", "") == field for node in walk(value)) or any(
        _speaks_of(method, given, field, seen | names) for name in names for given in given_to(method, name)
    )
