"""Keys of leases that go into a record: `limiter.enter(tenant)`, and `self.sessions[key] = Session(tenant)`.
Who ends the session says `limiter.leave(session.tenant)`; who takes it out otherwise may forget that."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Handle, Value
from auditor.project.code.bindings import assignments, given_to, own_attribute, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told, fields_of
from auditor.project.code.modules import Class
from auditor.project.outcome import Outcome


def tables_noting(outcome: Outcome, model: ClassModel) -> Iterator[tuple[str, str]]:
    """The table and the field of its entries, where one record is made in the function that is told the
    key."""
    function, acquisition, call = outcome.function, outcome.acquisition, outcome.call
    marks = acquisition.handle is Handle.ARGUMENT and acquisition.value is not Value.AMOUNT
    match call.args:
        case [ast.Name(id=key)] if marks and not acquisition.foreign and key in function.parameters:
            pass
        case _:
            return
    for target, value in assignments(function):
        if isinstance(target, ast.Subscript) and target.lineno > call.lineno:
            table = own_attribute(target.value, function.owner or "")
            made = list(given_to(function, value.id)) if isinstance(value, ast.Name) else [value]
            field = _field(made[0], key, outcome, model) if len(made) == 1 else None
            if table is not None and field is not None:
                yield table, field


def _field(made: ast.expr, key: str, outcome: Outcome, model: ClassModel) -> str | None:
    record = model.callee(outcome.function, made.func) if isinstance(made, ast.Call) else None
    if not isinstance(made, ast.Call) or not isinstance(record, Class):
        return None
    told = [at for at, value in told_by_position(made) if getattr(value, "id", "") == key]
    if len(told) != 1 or model.method(record, "__init__") is not None:
        return None
    field = field_told(model, record, told[0])[1:]
    return field if field in fields_of(model, record) else None
