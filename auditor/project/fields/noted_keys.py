"""Keys of leases that go into a record: `limiter.enter(tenant)`, and `self.sessions[key] = Session(tenant)`.
Who ends the session says `limiter.leave(session.tenant)`; who takes it out otherwise may forget that."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle, Value
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, given_to, own_attribute, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told, fields_of
from auditor.project.code.modules import Class, Function
from auditor.project.outcome import Outcome


def tables_noting(outcome: Outcome, model: ClassModel) -> Iterator[tuple[str, str]]:
    """The table and the field of its entries, where one record is made in the function that is told the
    key."""
    function, call = outcome.function, outcome.call
    match call.args:
        case [ast.Name(id=key)] if _marks(outcome) and key in function.parameters:
            yield from _noted(outcome, model, frozenset({key}))


def places_of_key(outcome: Outcome, model: ClassModel) -> Iterator[Path]:
    """Where the key lies on a record: `self.sessions[*].tenant`, or that of `request.slot = slot`, or of
    `tree.lock(request.node)`."""
    function, call = outcome.function, outcome.call
    names: set[str]
    match call.args if _marks(outcome) else []:
        case [ast.Name(id=key)]:
            names = {key}
        case [ast.Attribute(value=ast.Name(id=record), attr=field)] if record != function.owner:
            yield record, f".{field}"
            names = set()
        case [_]:
            names = set()
        case _:
            return
    names |= {t.id for t, value in assignments(function) if value is call and isinstance(t, ast.Name)}
    if _is_bound_again(function, names):
        return
    own = function.owner or ""
    for table, field in _noted(outcome, model, frozenset(names)):
        yield own, f".{table}", ANY_ITEM, f".{field}"
    for target, value in assignments(function):
        match target, value:
            case ast.Attribute(value=ast.Name(id=record), attr=field), ast.Name(id=name):
                if name in names and record != own and target.lineno > call.lineno:
                    yield record, f".{field}"


def _marks(outcome: Outcome) -> bool:
    acquisition = outcome.acquisition
    marks = acquisition.handle is Handle.ARGUMENT and acquisition.value is not Value.AMOUNT
    return marks and not acquisition.foreign


def _is_bound_again(function: Function, names: Set[str]) -> bool:
    return any(sum(1 for _ in given_to(function, name)) > 1 for name in names)


def _noted(outcome: Outcome, model: ClassModel, keys: Set[str]) -> Iterator[tuple[str, str]]:
    """Of `self.sessions[name] = Session(key)`, and `self.sessions.append(Session(key))`."""
    function = outcome.function
    for table, value in _entered(function, outcome.call.lineno):
        made = list(given_to(function, value.id)) if isinstance(value, ast.Name) else [value]
        field = _field(made[0], keys, outcome, model) if len(made) == 1 else None
        if table is not None and field is not None:
            yield table, field


def _entered(function: Function, line: int) -> Iterator[tuple[str | None, ast.expr]]:
    own = function.owner or ""
    for target, value in assignments(function):
        if isinstance(target, ast.Subscript) and target.lineno > line:
            yield own_attribute(target.value, own), value
    for call in function.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=table, attr="append" | "appendleft"), args=[value]):
                if call.lineno > line:
                    yield own_attribute(table, own), value


def _field(made: ast.expr, keys: Set[str], outcome: Outcome, model: ClassModel) -> str | None:
    record = model.callee(outcome.function, made.func) if isinstance(made, ast.Call) else None
    if not isinstance(made, ast.Call) or not isinstance(record, Class):
        return None
    told = [at for at, value in told_by_position(made) if getattr(value, "id", "") in keys]
    if len(told) != 1 or model.method(record, "__init__") is not None:
        return None
    field = field_told(model, record, told[0])[1:]
    return field if field in fields_of(model, record) else None
