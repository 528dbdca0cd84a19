"""Rows of a table that a method shortens without a look at what goes: `blocks = self.table[key]`, and
`del blocks[keep:]`, or `blocks.popleft()` of a window that moves on, or `self.table[key] = blocks[:keep]`."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.cutting import FILLING, FROM_AN_END, keeps_the_first, orderings
from auditor.project.fields.forgetting import for_good
from auditor.source.nodes import walk

_CUTTING = re.compile(r"del |maxlen|pop|= \[\]|[\])]\[|= \w+\[[^\]\n]*:|nlargest|nsmallest")


def rows_cut(project: Project, method: Function, attribute: str) -> Iterator[ast.stmt]:
    """The statements that do so, in a method that gives nothing back, as its callers do not either."""
    if not _CUTTING.search(method.text) or any(map(looks_releasing, method.calls)):
        return
    rows = _Rows(method, attribute)
    shortening = [node for node in method.statements if rows.shortens(node)]
    if shortening and not rows.looked_into(shortening) and for_good(project, method):
        yield from shortening


class _Rows:
    """What stands under the keys of one table, as a method speaks of it."""

    def __init__(self, method: Function, attribute: str) -> None:
        self.method = method
        self.attribute = attribute
        self.binding = [
            (target.id, value)
            for target, value in assignments(method)
            if isinstance(target, ast.Name) and self._is_looked_up(value)
        ]
        stored = [getattr(node, "id", "") for node in method.nodes if _is_stored(node)]
        self.names = {name for name, _ in self.binding if stored.count(name) == 1}
        self.bounded = {name for name, value in self.binding if _has_a_length(value)} & self.names

    def _is_looked_up(self, node: ast.AST) -> bool:
        """`self.table[key]`, `self.table.setdefault(key, deque())`"""
        match node:
            case (
                ast.Subscript(value=table, slice=ast.Name() | ast.Attribute(), ctx=ast.Load())
                | ast.Call(func=ast.Attribute(value=table, attr="get" | "setdefault"))
            ):
                return self._is_table(table)
        return False

    def _is_looked_up_or_set(self, node: ast.expr) -> bool:
        return self._is_looked_up(node) or (isinstance(node, ast.Subscript) and self._is_table(node.value))

    def _is_table(self, node: ast.AST) -> bool:
        return isinstance(node, ast.expr) and own_attribute(node, self.method.owner or "") == self.attribute

    def _is_row(self, node: ast.AST) -> bool:
        return self._is_looked_up(node) or (isinstance(node, ast.Name) and node.id in self.names)

    def shortens(self, node: ast.stmt) -> bool:
        if keeps_the_first(self.method, node, self._is_looked_up_or_set):
            return True
        match node:
            case (
                ast.Delete(targets=[ast.Subscript(value=row, slice=ast.Slice() | ast.Constant())])
                | ast.Assign(targets=[ast.Subscript(value=row, slice=ast.Slice())], value=ast.List(elts=[]))
            ):
                return self._is_row(row)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))) if (
                name in self.bounded
            ):
                return True  # and the first one is gone
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=row, attr=way), args=args)):
                from_an_end = way in FROM_AN_END and all(isinstance(each, ast.Constant) for each in args)
                return from_an_end and self._is_row(row)
            case ast.Assign(
                targets=[ast.Subscript(value=table, slice=key)],
                value=ast.Subscript(value=row, slice=ast.Slice(step=None) as cut),
            ):
                named = isinstance(row, ast.Name) and row.id in self.names
                same = named or (self._is_looked_up(row) and ast.unparse(key) == _key_of(row))
                return self._is_table(table) and same and (cut.lower or cut.upper) is not None
        return False

    def looked_into(self, shortening: list[ast.stmt]) -> bool:
        """Beyond asking whether there is one and how long it is, and putting more in."""
        known = {id(each) for statement in shortening for each in walk(statement)}
        known |= {id(value) for _, value in self.binding}
        ordered = (value for _, value in orderings(self.method, self._is_looked_up))
        known |= {id(each) for value in ordered for each in walk(value)}
        tables = set(known)
        for node in self.method.nodes:
            match node:
                case (
                    ast.Call(func=ast.Name(id="len"), args=[row])
                    | ast.If(test=row)
                    | ast.While(test=row)
                    | ast.UnaryOp(op=ast.Not(), operand=row)
                    | ast.Compare(left=row, ops=[ast.Is() | ast.IsNot()])
                ):
                    known.add(id(row))
                case ast.Call(func=ast.Attribute(value=row, attr=way)) if way in FILLING:
                    known.add(id(row))
                case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[table]):
                    tables.add(id(table))
            if self._is_looked_up(node):
                tables |= {id(each) for each in walk(node)}
        return any(
            (self._is_row(node) and not _is_stored(node) and id(node) not in known)
            or (self._is_table(node) and id(node) not in tables)
            for node in self.method.nodes
        )


def _has_a_length(value: ast.expr) -> bool:
    """`self.table.setdefault(key, deque(maxlen=window))`"""
    match value:
        case ast.Call(func=ast.Attribute(attr="setdefault"), args=[_, ast.Call(keywords=[length])]):
            return length.arg == "maxlen"
    return False


def _key_of(row: ast.expr) -> str:
    key = row.slice if isinstance(row, ast.Subscript) else next(iter(getattr(row, "args", ())), None)
    return ast.unparse(key) if key is not None else ""


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
