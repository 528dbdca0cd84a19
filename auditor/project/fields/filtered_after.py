"""Filters that leave out just those entries which a loop above has given back: `for row in self.rows: if
row.n in dead: pool.put(row)`, and then `self.rows = [row for row in self.rows if row.n not in dead]`."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

CONTRARY = {
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Eq: ast.NotEq,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
CONTRARIES = CONTRARY | {other: one for one, other in CONTRARY.items()}


def is_filtered_after(method: Function, attribute: str, ends: Set[str]) -> bool:
    """Of a field of the method's own object."""
    filters = list(_filters(method, attribute))
    return bool(filters) and all(
        any(_is_of_those(test, entry, left_out) for test, entry in _given_back(method, attribute, line, ends))
        for line, left_out in filters
    )


def _filters(method: Function, attribute: str) -> Iterator[tuple[int, str]]:
    """The lines of such filters, and what is true of each entry that is left out."""
    own = method.owner or ""
    for node in method.statements:
        match node:
            case ast.Assign(
                targets=[target],
                value=ast.ListComp(elt=ast.Name(id=kept), generators=[ast.comprehension() as turn]),
            ) if own_attribute(target, own) == attribute and getattr(turn.target, "id", "") == kept:
                if len(turn.ifs) == 1 and _is_it(method, turn.iter, attribute):
                    yield node.lineno, _spoken((_contrary(turn.ifs[0]), kept))


def _given_back(
    method: Function, attribute: str, line: int, ends: Set[str]
) -> Iterator[tuple[ast.expr, str]]:
    """The tests under which loops above a line give back the entry, and its name there."""
    for loop in method.statements:
        match loop:
            case ast.For(target=ast.Name(id=entry), iter=over, body=body) if loop.lineno < line:
                pass
            case _:
                continue
        if not _is_it(method, over, attribute):
            continue
        for branch in body:
            if isinstance(branch, ast.If) and any(_ends(each, entry, ends) for each in branch.body):
                yield branch.test, entry


def _is_it(method: Function, over: ast.expr, attribute: str) -> bool:
    """`self.rows`, or `rows` that is nothing else."""
    named = list(given_to(method, over.id)) if isinstance(over, ast.Name) else []
    meant = named[0] if len(named) == 1 else over
    return own_attribute(meant, method.owner or "") == attribute


def _is_of_those(test: ast.expr, entry: str, left_out: str) -> bool:
    """`row.done`, and `row.done and row.lease is not None`"""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    others = [part for part in parts if _spoken((part, entry)) != left_out]
    there = (
        isinstance(part, ast.Attribute)
        or (isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot))
        for part in others
    )
    return len(others) < len(parts) and all(there)


def _ends(statement: ast.stmt, entry: str, ends: Set[str]) -> bool:
    match statement:
        case ast.Expr(value=ast.Call() as call):
            names = {node.id for node in walk(call) if isinstance(node, ast.Name)}
            return last_name(call) in ends and entry in names
    return False


def _contrary(test: ast.expr) -> ast.expr:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return inner
        case ast.Compare(left=left, ops=[op], comparators=sides) if type(op) in CONTRARIES:
            return ast.Compare(left=left, ops=[CONTRARIES[type(op)]()], comparators=sides)
    return ast.UnaryOp(op=ast.Not(), operand=test)


def _spoken(asked: tuple[ast.expr, str]) -> str:
    """The test as it is written, whatever the entry is called."""
    test, entry = asked
    copied = ast.parse(ast.unparse(test), mode="eval").body
    for node in walk(copied):
        if isinstance(node, ast.Name) and node.id == entry:
            node.id = "_"
    return ast.unparse(copied)
