"""Lists that a method has from a table of its object: `pages = self.spare.setdefault(key, [])`, and
`pages.append(pool.take())`. What is put into such a list lies in the table."""

import ast
from dataclasses import replace

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome


def lying_in_tables(outcome: Outcome) -> Outcome:
    """With the table's path for places that begin with the name of such a list."""
    stored = [(node, _path_by_table(outcome.function, path)) for node, path in outcome.stored]
    return replace(outcome, stored=stored) if stored != outcome.stored else outcome


def _path_by_table(function: Function, path: Path) -> Path:
    if len(path) != 2 or path[1] != ANY_ITEM or function.owner is None or path[0] in function.parameters:
        return path
    bound = [
        node
        for node in function.nodes
        if isinstance(node, ast.Name) and node.id == path[0] and isinstance(node.ctx, ast.Store)
    ]
    values = list(given_to(function, path[0]))
    if len(bound) != 1 or len(values) != 1:
        return path
    field = _table_of(values[0], function.owner)
    return (function.owner, f".{field}", ANY_ITEM, ANY_ITEM) if field is not None else path


def _table_of(value: ast.expr, own: str) -> str | None:
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="setdefault"), args=[_, _]):
            return own_attribute(table, own)
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_]):
            return own_attribute(table, own)
        case ast.Subscript(value=table, slice=key) if not isinstance(key, ast.Slice):
            return own_attribute(table, own)
    return None
