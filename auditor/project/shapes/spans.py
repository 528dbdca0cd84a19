"""Allocators of spans: all that there is lies in one span at first, `self.holes = [(0, size)]`; one method
looks for a span that is large enough, hands out a piece of it and writes what is left, and another puts in
the piece that it is told, be it by a list made anew:

    merged = sorted([*self.holes, piece])
    ...
    self.holes = merged"""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.bindings import assigned_by, assignments, own_attribute
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.name_bindings import bound_by, mentions
from auditor.project.shapes.pieces import leaves_a_rest
from auditor.project.shapes.pool_state import REMOVERS

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def cut_into_spans(
    lending: Sequence[FieldWork], given: Sequence[FieldWork], begun: Sequence[FieldWork]
) -> Iterator[tuple[FieldWork, list[FieldWork]]]:
    """Methods that cut a piece off, with those that put one back."""
    for name in sorted({name for work in begun for name in _whole_at_first(work)}):
        takers = [work for work in lending if work not in begun and _cuts(work, name)]
        rest = [work for work in given if work not in begun and work not in takers]
        givers = [work for work in rest if _puts_back(work, name)]
        for taker in takers if givers else ():
            yield taker, givers


def _whole_at_first(work: FieldWork) -> Iterator[str]:
    for target, value in assignments(work.method):
        name = own_attribute(target, work.method.owner or "")
        if name is not None and is_whole(value):
            yield name


def is_whole(value: ast.expr) -> bool:
    """`[(0, size)]`, `[Span(0, size)]`, `{0: size}`"""
    match value:
        case ast.List(elts=[ast.Tuple(elts=[first, size]) | ast.List(elts=[first, size])]):
            pass
        case ast.List(elts=[ast.Call(args=[first, size, *_])]) | ast.Dict(keys=[first], values=[size]):
            pass
        case _:
            return False
    return isinstance(first, ast.Constant) and first.value == 0 and not isinstance(size, ast.Constant)


def _cuts(work: FieldWork, name: str) -> bool:
    """It compares how large they are with what it is told, reckons what is left, changes the field, and hands
    some of it out."""
    if not work.told or not _writes(work, name):
        return False
    own = work.method.owner or ""
    marked = {id(node) for node in work.method.of_kind(ast.Attribute) if own_attribute(node, own) == name}
    names = work.derived(_found_in_comprehensions(work, marked), marked)
    told = work.derived(work.told, frozenset()) - names | work.told
    compared = any(
        isinstance(node.ops[0], ORDERS) and _of_both(node, names, told)
        for node in work.method.of_kind(ast.Compare)
    )
    reckoned = any(
        isinstance(node.op, ast.Add | ast.Sub) and _of_both(node, names, told)
        for node in work.method.of_kind(ast.BinOp)
    )
    return compared and reckoned and any(mentions(value, names, frozenset()) for value in work.returned)


def _of_both(node: ast.AST, names: Set[str], told: Set[str]) -> bool:
    return mentions(node, names, frozenset()) and mentions(node, told, frozenset())


def _found_in_comprehensions(work: FieldWork, marked: set[int]) -> set[str]:
    """`hole` of `[hole for hole in self.holes if hole[1] >= size]`"""
    return {
        name
        for node in work.method.of_kind(ast.comprehension)
        if mentions(node.iter, frozenset(), marked)
        for name in bound_by(node.target)
    }


def _writes(work: FieldWork, name: str) -> bool:
    """What is left of a span, the others, or where it begins; not `(low + n, high + n)`, which has moved."""
    own = work.method.owner or ""
    moved = {
        id(to)
        for to, value in assignments(work.method)
        if isinstance(value, ast.Tuple) and not leaves_a_rest(value)
    }
    for node in work.method.nodes:
        match node:
            case _ if id(node) in moved:
                continue
            case (
                ast.Attribute(ctx=ast.Store())
                | ast.Subscript(value=ast.Attribute(), ctx=ast.Store() | ast.Del())
            ):
                place = node.value if isinstance(node, ast.Subscript) else node
            case ast.Call(func=ast.Attribute(value=place, attr=way)) if way in REMOVERS:
                pass
            case _:
                continue
        if isinstance(place, ast.expr) and own_attribute(place, own) == name:
            return True
    return False


def _puts_back(work: FieldWork, name: str) -> bool:
    """What it is told goes in, or into what takes the place of the field, with all that was there."""
    if any(put.field == name and _is_told(work, put.value, put.key) for put in work.put):
        return True
    own = work.method.owner or ""
    marked = {id(node) for node in work.method.of_kind(ast.Attribute) if own_attribute(node, own) == name}
    names = work.derived(_found_in_comprehensions(work, marked), marked)
    return any(
        own_attribute(target, own) == name and work.is_from_told(value) and mentions(value, names, marked)
        for node in work.method.statements
        for target, value in assigned_by(node)
    )


def _is_told(work: FieldWork, *parts: ast.expr | None) -> bool:
    return any(part is not None and work.is_from_told(part) for part in parts)
