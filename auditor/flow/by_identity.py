"""Entries that are told by what `id` says of them: `del self._held[id(frame)]` leaves whoever calls with the
frame itself, which the method goes on with under that name."""

import ast

from auditor.ir.conditions import path_of
from auditor.ir.ops import Path


def told_by_identity(at: ast.AST) -> Path | None:
    """`frame` of `held[id(frame)]`, and of `held.pop(id(frame), None)`."""
    match at:
        case ast.Subscript(slice=ast.Call(func=ast.Name(id="id"), args=[thing])):
            return path_of(thing)
        case ast.Call(
            func=ast.Attribute(attr="pop"), args=[ast.Call(func=ast.Name(id="id"), args=[thing]), *_]
        ):
            return path_of(thing)
    return None
