"""Tables of tensors, or of rows of plain numbers, that lie under the numbers which a pool lends.

    self.buffers = [torch.empty(shape) for _ in range(n)]
    ...
    wire.put(peer, table.buffers[slot])

Whoever is given such a tensor, and keeps it, cannot tell by it which number it was.
"""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import given_to_field
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.outside_words import MEMORY
from auditor.project.pools.plain_memory import elements, is_row


def is_table_of_memory(model: ClassModel, function: Function, looked_up: ast.Subscript) -> bool:
    """By what its entries are said to be, or by what it was filled with."""
    each = model.type_of(function, looked_up)
    if isinstance(each, str):
        return each in MEMORY
    return any(
        is_row(made) or (isinstance(made, ast.Call) and model.callee(filler, made.func) in MEMORY)
        for filler, made in _filled_with(model, function, looked_up.value)
    )


def _filled_with(
    model: ClassModel, function: Function, table: ast.expr
) -> Iterator[tuple[Function, ast.expr]]:
    owner = model.type_of(function, table.value) if isinstance(table, ast.Attribute) else None
    if not isinstance(table, ast.Attribute) or not isinstance(owner, Class):
        return
    for cls in model.lineage(owner):
        for method in cls.methods.values():
            for value in given_to_field(method, table.attr):
                yield from ((method, made) for made in elements(value))
