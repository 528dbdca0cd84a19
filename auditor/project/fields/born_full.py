"""Records that are made with a lease, and have one ever after:

    self.requests[rid] = Request(rid, hold)          request = self.requests[rid]
                                                     request.hold = self.ledger.hold(n)

Nobody makes one without, and nobody empties the field, so there is one where another is put."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments, given_to, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.project.fields.filling_again import Filling, found_in_a_table


def born_full(filling: Filling, call: ast.Call, family: Sequence[Function], model: ClassModel) -> bool:
    """Of a record that is looked up by its key, as one that must be there; `call` lends what it gets."""
    looked_up = found_in_a_table(filling.method, filling.owner)
    if filling.key is not None or not isinstance(looked_up, ast.Subscript):
        return False
    made = list(_made_with(filling.field, family, model))
    if not made or _is_ever_emptied(filling.field, family):
        return False
    return all(value is not None and _is_lent(method, value, call) for method, value in made)


def _made_with(
    field: str, family: Sequence[Function], model: ClassModel
) -> Iterator[tuple[Function, ast.expr | None]]:
    """What the family tells records of one class for this field, None where it tells one nothing."""
    told: dict[Class, list[tuple[Function, ast.expr | None]]] = {}
    for method in family:
        for made in method.calls:
            record = model.callee(method, made.func)
            if isinstance(record, Class):
                values = [
                    value
                    for position, value in told_by_position(made)
                    if field_told(model, record, position) == f".{field}"
                ]
                told.setdefault(record, []).append((method, values[0] if values else None))
    for records in told.values():
        if any(value is not None for _, value in records):
            yield from records


def _is_ever_emptied(field: str, family: Sequence[Function]) -> bool:
    return any(
        getattr(target, "attr", "") == field and isinstance(value, ast.Constant)
        for method in family
        for target, value in assignments(method)
    ) or any(f"del {name}.{field}" in method.text for method in family for name in method.parameters)


def _is_lent(method: Function, value: ast.expr, call: ast.Call) -> bool:
    """By a call of the same pool."""
    given = list(given_to(method, value.id)) if isinstance(value, ast.Name) else [value]
    lends = [
        each
        for each in given
        if isinstance(each, ast.Call) and ast.unparse(each.func) == ast.unparse(call.func)
    ]
    return bool(given) and len(lends) == len(given)
