"""Entries of a table that get another key, whatever lies there: `self.tables[new] = self.tables.pop(old)` in
`rename(old, new)`, which says nothing else of `new`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.ways_out import SAYING
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def renamed_over(project: Project, method: Function, table: str) -> Iterator[ast.AST]:
    """Where nobody who calls the method has to do with the table either."""
    for target, value in assignments(method) if f".{table}" in method.text else ():
        match target:
            case ast.Subscript(value=held, slice=ast.Name(id=new)) if _is(held, method, table):
                old = _taken_from(method, value, table)
                told = method.parameters[1:]
                if old in told and new in told and new != old and not _asks_for(method, new, target):
                    yield from () if _is_reckoned_with(project, method, table) else (target,)


def _is(held: ast.expr, method: Function, table: str) -> bool:
    return own_attribute(held, method.owner or "") == table


def _taken_from(method: Function, value: ast.expr, table: str) -> str:
    """The key of what is taken out of the same table, also by way of a local name."""
    values = list(given_to(method, value.id)) if isinstance(value, ast.Name) else [value]
    match values:
        case [ast.Call(func=ast.Attribute(value=held, attr="pop"), args=[ast.Name(id=old), *_])]:
            return old if _is(held, method, table) else ""
    return ""


def _asks_for(method: Function, new: str, store: ast.expr) -> bool:
    """`if new in self.tables`, `self.drop(new)`, `other = self.tables.get(new)`; not `table.name = new`."""
    aside = {id(part) for part in walk(store)}
    aside |= {id(part) for call in method.calls if last_name(call) in SAYING for part in walk(call)}
    asking = (
        node
        for node in method.nodes
        if isinstance(node, ast.Compare | ast.Call | ast.Subscript)
        if id(node) not in aside and not _compares(node)
    )
    return any(isinstance(part, ast.Name) and part.id == new for node in asking for part in walk(node))


def _compares(node: ast.AST) -> bool:
    """`old == new`"""
    return isinstance(node, ast.Compare) and all(isinstance(way, ast.Eq | ast.NotEq) for way in node.ops)


def _is_reckoned_with(project: Project, method: Function, table: str) -> bool:
    return any(
        function is not method and f".{table}" in function.text
        for module in project.parsed()
        if f"{method.name}(" in module.text
        for function in module.by_node.values()
        if any(last_name(call) == method.name for call in function.calls)
    )
