"""Entries that get into a table all at once:

    self.margins.update(placed)  # of `placed[account] = hold`
    self.margins |= {account: self.ledger.hold(n) for account, n in wanted.items()}

Each takes the place of what lies there under its key, as if it had been put there by itself."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, given_to
from auditor.project.code.modules import Function


def merged_into(method: Function, node: ast.stmt) -> Iterator[tuple[ast.Subscript, ast.expr]]:
    """Places of a table of some object, and what is put there, if the method has not spoken of the table."""
    match node:
        case ast.Expr(
            value=ast.Call(func=ast.Attribute(value=ast.Attribute() as table, attr="update"), args=[given])
        ):
            pass
        case ast.AugAssign(target=ast.Attribute() as table, op=ast.BitOr(), value=given):
            pass
        case _:
            return
    if not _is_spoken_of(method, table, node.lineno):
        for key, value in _entries(method, given):
            place = ast.Subscript(value=table, slice=key, ctx=ast.Store())
            yield ast.copy_location(place, node), value


def _is_spoken_of(method: Function, table: ast.Attribute, line: int) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == table.attr
        and node is not table
        and node.lineno <= line
        for node in method.nodes
    )


def _entries(method: Function, given: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Keys and values of a dict that is written here, or that has a name here."""
    match given:
        case ast.Dict(keys=keys, values=values):
            yield from ((key, each) for key, each in zip(keys, values, strict=True) if key is not None)
        case ast.DictComp(key=key, value=value):
            yield key, value
        case ast.Name(id=name) if name not in method.parameters:
            for made in given_to(method, name):
                if isinstance(made, ast.Dict | ast.DictComp):
                    yield from _entries(method, made)
            for to, value in assignments(method):
                match to:
                    case ast.Subscript(value=ast.Name(id=of), slice=key) if of == name:
                        yield key, value
