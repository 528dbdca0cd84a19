"""Ends that ask a flag which is down when the object has its lease already: `self.slab = slabs.alloc()` and
`self.dirty = False` at birth, `if self.dirty: slabs.free(self.slab)` at the end, and a method in between that
may never be called raises it."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.lease import StoredField
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def ended_under_a_flag(
    outcome: Outcome, stored: StoredField, family: Sequence[Function]
) -> Iterator[StoredField]:
    """The field with the only end that it has, where that passes it by for such a flag."""
    birth, field = outcome.function, stored.field.path
    ends = [method for method in family if method.qualname in stored.released_by]
    if (
        birth.name not in INITIAL
        or len(ends) != 1
        or len(stored.released_by) != 1
        or not field.isidentifier()
    ):
        return
    down = {name for name, value in _set_at_the_top(birth) if _is(value, False)}
    filled = [name for name, value in _set_at_the_top(birth) if any(p is outcome.call for p in walk(value))]
    if field not in filled:
        return
    raised = {
        name
        for method in family
        if method is not birth and field not in (set_here := dict(_set(method)))
        for name, value in set_here.items()
        if _is(value, True)
    }
    if any(_all_under(ends[0], flag, field) for flag in sorted(down & raised)):
        yield StoredField(stored.field, outcome.lease.span, partly_by=(ends[0].qualname,))


def _set(method: Function) -> Iterator[tuple[str, ast.expr]]:
    for target, value in assignments(method):
        if (name := own_attribute(target, method.owner or "")) is not None:
            yield name, value


def _set_at_the_top(birth: Function) -> Iterator[tuple[str, ast.expr]]:
    """Under no condition."""
    top = {id(statement.value) for statement in _body(birth) if isinstance(statement, ast.Assign)}
    yield from ((name, value) for name, value in _set(birth) if id(value) in top)


def _all_under(end: Function, flag: str, field: str) -> bool:
    """`if self.dirty:` stands around all that the end does with the field."""
    own = end.owner or ""
    mentions = [
        node for node in end.nodes if isinstance(node, ast.expr) and own_attribute(node, own) == field
    ]
    for statement in _body(end):
        match statement:
            case ast.If(test=test, body=body, orelse=[]) if own_attribute(test, own) == flag:
                within = {id(node) for part in body for node in walk(part)}
                if mentions and all(id(node) in within for node in mentions):
                    return True
    return False


def _body(method: Function) -> list[ast.stmt]:
    body = method.body
    return body if isinstance(body, list) else []


def _is(value: ast.expr, truth: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is truth
