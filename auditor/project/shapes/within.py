"""Whether a method works on a field or on what lies in it under a key: a wheel of slots stores no timers."""

import ast

from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.owners import owners_of


def takes_within(work: FieldWork, name: str) -> bool:
    """`self.shelves[size].pop()`, or out of a local name; not `self.shelves.pop()`."""
    return any(field == name and not _is_of_all(work, node) for field, node in work.taken)


def only_adds_within(work: FieldWork, name: str) -> bool:
    """`self.shelves[size].append(buffer)` is all that it puts there."""
    within = sum(field == name for field, _ in work.added_under)
    return 0 < within == sum(put.field == name for put in work.put)


def _is_of_all(work: FieldWork, node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner)))):
            return owner in owners_of(work.method)
    return False
