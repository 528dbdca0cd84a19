"""A lease that is given back only where a flag says so, and a method that turns the flag: `finish(request)`
gives the draft's slots back `if request.use_draft:`, and `disable_draft(request)` sets that to False while
the slots are there."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.lease import Field, StoredField
from auditor.project.code.bindings import assignments, given_to, gone_through
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.one_end_forgets import Known
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk

SKIPPING = (ast.Return, ast.Continue)


def with_its_flag_turned(outcome: Outcome, family: Sequence[Function], known: Known) -> Iterator[StoredField]:
    """The field that it was stored in, if one of these methods turns the flag without having to do with what
    is there, and nobody gives that back but where the flag says so."""
    filling = outcome.function
    for _, path in outcome.stored:
        field = next((part[1:] for part in reversed(path) if part.startswith(".")), "")
        turning = _turned_by(family, filling, field, known) if field else None
        if turning is not None and filling.cls is not None:
            place = Field(filling.cls.qualname, "".join(path[1:])[1:], path[0])
            yield StoredField(place, outcome.lease.span, partly_by=(turning.qualname,))
            return


def _turned_by(family: Sequence[Function], filling: Function, field: str, known: Known) -> Function | None:
    ends = [
        (each, call, owners)
        for each in family
        for call in known(each)
        if (owners := _owners_of_given(each, call, field))
    ]
    flags = [set(_flags_around(method, call, owners)) for method, call, owners in ends]
    asked = set.intersection(*flags) if flags else set()
    names = {method.name for method, _, _ in ends}
    for method in sorted(family, key=lambda each: each.qualname) if asked else ():
        if method is filling or method.name in names | INITIAL or f".{field}" in method.text or known(method):
            continue
        if any(method.calling(name) for name in names):
            continue  # `self.end()`, and `self.open = False`
        if any((flag, not says) in asked for flag, says in _set_in(method)):
            return method
    return None


def _owners_of_given(method: Function, call: ast.Call, field: str) -> set[str]:
    """Names of the objects whose field it is given: what lies there, by itself or under a name."""
    operands = [*call.args, *(keyword.value for keyword in call.keywords)] or [call.func]
    named = [node.id for operand in operands for node in walk(operand) if isinstance(node, ast.Name)]
    values = [each for name in named for each in (*given_to(method, name), *gone_through(method, name))]
    parts = [node for each in (*operands, *values) for node in walk(each)]
    asked = {
        id(node.func.value)
        for node in parts
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    return {
        node.value.id
        for node in parts
        if isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.value, ast.Name)
        if id(node) not in asked  # `self.slots.alloc(n)` of the pool that is called like the field
    }


def _flags_around(method: Function, call: ast.Call, owners: Set[str]) -> Iterator[tuple[str, bool]]:
    """`if request.use_draft:` around it, `if not request.use_draft: return` before it, of these objects: the
    flag, and what it says where the call is made."""
    for test, holds in _conditions_around(method, call):
        yield from ((flag, says) for owner, flag, says in _said(test, holds) if owner in owners)


def _conditions_around(method: Function, call: ast.Call) -> Iterator[tuple[ast.expr, bool]]:
    for holder in (method.node, *method.statements):
        for suite in (getattr(holder, name, []) for name in ("body", "orelse", "finalbody")):
            at = next((n for n, each in enumerate(suite) if any(part is call for part in walk(each))), None)
            if at is None:
                continue
            if isinstance(holder, ast.If):
                yield holder.test, suite is holder.body
            for before in suite[:at]:
                if isinstance(before, ast.If) and not before.orelse and isinstance(before.body[-1], SKIPPING):
                    yield before.test, False


def _said(test: ast.expr, holds: bool) -> Iterator[tuple[str, str, bool]]:
    """What such a condition says of attributes where it holds, or does not."""
    match test:
        case ast.Attribute(value=ast.Name(id=owner), attr=flag):
            yield owner, flag, holds
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _said(operand, not holds)
        case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) == holds:
            for part in parts:
                yield from _said(part, holds)


def _set_in(method: Function) -> Iterator[tuple[str, bool]]:
    for target, value in assignments(method):
        match target, value:
            case ast.Attribute(attr=flag), ast.Constant(value=bool() as says):
                yield flag, says
