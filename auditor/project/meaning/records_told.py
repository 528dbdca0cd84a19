"""What a new object's fields are set to for sure: `Part(n, buffer, borrowed=True)`."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.effects import Position
from auditor.project.code.bindings import assigned_by, assignments, given_to, told_by_position
from auditor.project.code.calls import Calls, constants_passed
from auditor.project.code.kept_as_told import fields_of
from auditor.project.code.modules import Class, Function

Constants = frozenset[tuple[str, object]]


def constants_of_record(
    calls: Calls, function: Function, call: ast.Call, position: Position, name: str
) -> Constants:
    """`part.borrowed` where the callee gets, as its `part`, a record that was made for it: what it asks of
    that is known."""
    made = _made(function, call, position)
    cls = calls.targets(function, made)[1] if made is not None else None
    if made is None or not isinstance(cls, Class):
        return frozenset()
    told = fields_told(calls, cls, made)
    texts = [cls.module.text, function.module.text] if _is_given_to_others(function, call, position) else []
    texts += _methods_called(function, call, position, cls)
    return frozenset(
        (f"{name}.{field}", constant)
        for field, constant in told
        if (constant is None or isinstance(constant, bool)) and not any(_sets(text, field) for text in texts)
    )


def _methods_called(function: Function, call: ast.Call, position: Position, cls: Class) -> Iterator[str]:
    """`plan.reserve(pool)`: what its methods set, written as of another object."""
    told = dict(told_by_position(call)).get(position)
    name = told.id if isinstance(told, ast.Name) else ""
    for other in function.calls:
        match other.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=method) if owner == name:
                if (found := cls.methods.get(method)) is not None:
                    yield found.text.replace("self.", "it.")


def _is_given_to_others(function: Function, call: ast.Call, position: Position) -> bool:
    """`reserve(plan)` before `retire(plan)` may set what was not set when it was made."""
    told = dict(told_by_position(call)).get(position)
    if not isinstance(told, ast.Name):
        return False
    return any(
        isinstance(node, ast.Name) and node.id == told.id
        for other in function.calls
        if other is not call
        for node in (*other.args, *(keyword.value for keyword in other.keywords))
    )


def _sets(text: str, field: str) -> bool:
    """`plan.send = lease`, `plan.send, plan.recv = both`; not `self.send = None`."""
    return re.search(rf"(?<!self)\.{field}\b(?:, [\w.]+)* = ", text) is not None


def _made(function: Function, call: ast.Call, position: Position) -> ast.Call | None:
    """The call that made the argument, also by a name of which no field is set afterwards."""
    value: ast.expr | None = None
    if isinstance(position, int):
        value = call.args[position] if 0 <= position < len(call.args) else None
    else:
        value = next((each.value for each in call.keywords if each.arg == position), None)
    if isinstance(value, ast.Name):
        given, name = list(given_to(function, value.id)), value.id
        changed = any(
            isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == name
            for target, _ in assignments(function)
        )
        value = given[0] if len(given) == 1 and not changed else None
    return value if isinstance(value, ast.Call) else None


def fields_told(calls: Calls, cls: Class, call: ast.Call) -> Constants:
    """The fields that are set to constants, which the call writes or the class has by default."""
    init = calls.model.method(cls, "__init__")
    passed = constants_passed(init, call, True) if init else _told_by_name(calls, cls, call)
    fields = dict(fields_set(init)) if init else {name: name for name in fields_of(calls.model, cls)}
    return frozenset((fields[name], constant) for name, constant in passed if name in fields)


def fields_set(init: Function) -> Iterator[tuple[str, str]]:
    """Each parameter and the field that is set to it."""
    for target, source in assignments(init):
        if isinstance(target, ast.Attribute) and isinstance(source, ast.Name):
            yield source.id, target.attr


def _told_by_name(calls: Calls, cls: Class, call: ast.Call) -> Constants:
    """What a dataclass is told, or has by default."""
    names = fields_of(calls.model, cls)
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        not each.arg for each in call.keywords
    ):
        return frozenset()
    values: dict[str, ast.expr] = {}
    for each in reversed(calls.model.lineage(cls)):
        for statement in each.node.body:
            values.update(
                (target.id, source)
                for target, source in assigned_by(statement)
                if isinstance(target, ast.Name)
            )
    values.update(zip(names, call.args, strict=False))
    values.update((each.arg, each.value) for each in call.keywords if each.arg)
    return frozenset((name, node.value) for name, node in values.items() if isinstance(node, ast.Constant))
