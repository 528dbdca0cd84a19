"""Local names by which a method has an entry of a container in its hands, and puts it nowhere:

    it = self.sessions[name].iterators[key]        source, points = self.series[name]
    it.position += steps                           source.amps = next(points)

What lies in such an entry lies where it was."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import Path
from auditor.project.code.bindings import (
    assigned_by,
    assignments,
    own_attribute,
    root_of,
    told_by_position,
)
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.ways_out import SAYING
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.summaries import Answer

LOOKING = frozenset({"get", "setdefault", "pop", "popleft", "values", "items", "copy"})
STRIKING = frozenset({"remove", "discard"})
LISTING = frozenset({"list", "tuple", "sorted", "reversed", "enumerate"})


def stays_in_its_hands(method: Function, answer: Answer, path: Path) -> bool:
    """All that holds it besides are names that the method has for entries of the container."""
    if answer.result is not None or not answer.stored:
        return False
    roots = {place[0] for place in answer.stored}
    looked_up = all(root not in method.parameters and _is_of(method, root, path[1][1:]) for root in roots)
    return looked_up and not any(_works_with(method, call, roots) for call in method.calls)


def _works_with(method: Function, call: ast.Call, roots: set[str]) -> bool:
    """`plan.body.stop()`, `self.drop(plan)`, `release(plan.seat)`, and of `body = plan.body`."""
    names = roots | {
        target.id
        for target, value in assignments(method)
        if isinstance(target, ast.Name) and isinstance(value, ast.Attribute) and root_of(value) in roots
    }
    if last_name(call) in SAYING | STRIKING:
        return False
    told = [each for _, each in told_by_position(call)]
    whole = any(isinstance(each, ast.Name) and each.id in names for each in told)
    ends = looks_releasing(call) and any(root_of(each) in names for each in told)
    return whole or ends or (isinstance(call.func, ast.Attribute) and root_of(call.func.value) in names)


def _is_of(method: Function, name: str, field: str) -> bool:
    values = list(_given(method, name))
    return bool(values) and all(is_looked_up(value, method.owner or "", field) for value in values)


def _given(method: Function, name: str) -> Iterator[ast.expr]:
    """Also to one of several names, and what loops go over."""
    for node in method.statements:
        pairs = [(node.target, node.iter)] if isinstance(node, ast.For) else list(assigned_by(node))
        for target, value in pairs:
            if any(isinstance(each, ast.Name) and each.id == name for each in _names(target)):
                yield value


def _names(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _names(each)
    else:
        yield target


def is_looked_up(value: ast.expr, own: str, field: str) -> bool:
    """`self.sessions[name].iterators.get(key)`, whatever the way down from the field."""
    while own_attribute(value, own) is None:
        match value:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                value = inner
            case ast.Call(func=ast.Attribute(value=inner, attr=way)) if way in LOOKING:
                value = inner
            case ast.Call(func=ast.Name(id=way), args=[inner]) if way in LISTING:
                value = inner
            case _:
                return False
    return own_attribute(value, own) == field
