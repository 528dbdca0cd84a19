"""Keys that move between two tables of one object: who takes one out of the second finds none in the
first."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, fillings, made_of, same


def comes_from_another_table(filling: Filling, family: Sequence[Function]) -> bool:
    """`del self.swapped[key]`, and `self.tables[key] = fresh`, where each method that puts a key into
    `swapped` takes it out of `tables`."""
    own = filling.method.owner
    if filling.key is None or own is None or filling.owner != own:
        return False
    left = {field for field, key in _struck_off(filling.method, own) if same(key, filling.key)}
    return any(_only_moved(field, filling.field, family) for field in left - {filling.field})


def _only_moved(into: str, out_of: str, family: Sequence[Function]) -> bool:
    """Into the one table nobody puts a key that he leaves in the other."""
    put = [
        each
        for method in family
        if method.owner is not None and f".{into}" in method.text
        for each in fillings(method, method.owner, into)
        if each.key is not None
    ]
    return bool(put) and all(_leaves(each, out_of) for each in put)


def _leaves(put: Filling, out_of: str) -> bool:
    struck = _struck_off(put.method, put.owner)
    return any(field == out_of and put.key is not None and same(key, put.key) for field, key in struck)


def _struck_off(method: Function, own: str) -> Iterator[tuple[str, ast.expr]]:
    """`del self.rows[key]`, `self.rows.pop(key)`: the table, and the key."""
    for node in method.nodes:
        match node:
            case ast.Subscript(value=table, slice=key, ctx=ast.Del()):
                pass
            case ast.Call(func=ast.Attribute(value=table, attr="pop"), args=[key, *_]):
                pass
            case _:
                continue
        if field := own_attribute(table, own):
            yield field, made_of(method, key)
