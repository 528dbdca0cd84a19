"""Classes whose objects keep what they are made of under their fields' names: dataclasses and named tuples,
whichever way these are written."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from auditor.flow.effects import Position
from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.modules import Class, last_part

if TYPE_CHECKING:
    from auditor.project.code.class_model import ClassModel

NAMED_TUPLES = frozenset({"namedtuple", "NamedTuple"})


def class_by_call(name: str, value: ast.expr) -> ast.ClassDef | None:
    """`Lent = namedtuple("Lent", "row size")` is a class of that base with no body of its own."""
    if not isinstance(value, ast.Call) or not _listed(value):
        return None
    made = ast.ClassDef(name, bases=[value], keywords=[], body=[], decorator_list=[])
    return ast.copy_location(made, value)


def fields_of(model: ClassModel, cls: Class) -> list[str]:
    """In the order in which the class is told of them."""
    return [name for each in reversed(model.lineage(cls)) for name in _own_fields(each.node)]


def field_told(model: ClassModel, cls: Class, position: Position) -> str:
    """Where the class keeps this argument."""
    if isinstance(position, str):
        return "." + position
    fields = fields_of(model, cls)
    return "." + fields[position] if position < len(fields) else ANY_ITEM


def spellings(model: ClassModel, made: Class | str | None, rest: Path) -> tuple[Path, ...]:
    """What lies under the field `.row` of a named tuple is its first item as well: `row, size = lend()`."""
    if not isinstance(made, Class) or not rest or not is_tuple(model, made):
        return (rest,)
    for index, name in enumerate(fields_of(model, made)):
        if rest[0] in (f".{name}", f"[{index}]"):
            return (f".{name}", *rest[1:]), (f"[{index}]", *rest[1:])
    return (rest,)


def is_tuple(model: ClassModel, cls: Class) -> bool:
    bases = (base for each in model.lineage(cls) for base in each.node.bases)
    return any(last_part(base.func if isinstance(base, ast.Call) else base) in NAMED_TUPLES for base in bases)


def _own_fields(node: ast.ClassDef) -> list[str]:
    listed = [name for base in node.bases if isinstance(base, ast.Call) for name in _listed(base)]
    return listed + [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def _listed(call: ast.Call) -> list[str]:
    """The names in `namedtuple("Lent", ["row", "size"])` and `NamedTuple("Lent", [("row", int)])`."""
    if last_part(call.func) not in NAMED_TUPLES:
        return []
    told = [*call.args[1:2], *(each.value for each in call.keywords if each.arg in ("field_names", "fields"))]
    match told:
        case [ast.Constant(value=str() as names)]:
            return names.replace(",", " ").split()
        case [ast.List(elts=parts) | ast.Tuple(elts=parts)]:
            firsts = [part.elts[0] if isinstance(part, ast.Tuple) and part.elts else part for part in parts]
            values = (each.value for each in firsts if isinstance(each, ast.Constant))
            return [each for each in values if isinstance(each, str)]
    return []
