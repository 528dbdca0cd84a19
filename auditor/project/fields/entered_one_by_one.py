"""What `__enter__` counts or locks of each thing in a list of its object: `for p in self.params: fetch(p)`"""

import ast
from collections.abc import Iterator, Sequence

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import assignments, awaited, gone_through, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.forgetting import INITIAL
from auditor.source.nodes import walk


def gone_through_by_all(function: Function, path: Path) -> Path:
    """`self.params[*]` of the `p` of `for p in self.params:`."""
    over = list(gone_through(function, path[0])) if len(path) == 1 else []
    field = own_attribute(over[0], function.owner or "") if len(over) == 1 else None
    return (function.owner or "", f".{field}", ANY_ITEM) if field is not None else path


def noted_in(function: Function, acquire: ast.Call, key: Path) -> Iterator[Path]:
    """`self.pinned[*]` of `self.pinned.append(key)`; `self.node` of `self.node = self.tree.lock(key)`, and of
    `self.node = key`."""
    own = function.owner or ""
    for call in function.calls if len(key) == 1 else ():
        match call:
            case ast.Call(func=ast.Attribute(value=table, attr="append" | "add"), args=[ast.Name(id=name)]):
                if name == key[0] and (field := own_attribute(table, own)) is not None:
                    yield own, f".{field}", ANY_ITEM
    for target, value in assignments(function):
        same = awaited(value) is acquire or (isinstance(value, ast.Name) and (value.id,) == key)
        if same and (field := own_attribute(target, own)) is not None:
            yield own, f".{field}"


def asks_what_others_set(family: Sequence[Function], names: Sequence[str]) -> bool:
    """`if self.taken_over: return`, which another method sets, and sees to them."""
    asked = {
        node.attr
        for method in family
        for each in (method.statements if method.qualname in names else ())
        for node in walk(getattr(each, "test", None) or ast.Pass())
        if isinstance(node, ast.Attribute)
    }
    return any(
        isinstance(node, ast.Attribute) and node.attr in asked and isinstance(node.ctx, ast.Store)
        for method in family
        if method.name not in INITIAL and method.qualname not in names
        for node in method.nodes
    )
