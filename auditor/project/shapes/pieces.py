"""Pieces that are cut off a list or an array, and pieces that are joined to one."""

import ast
from typing import TypeGuard

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

JOINING = frozenset({"cat", "concat", "concatenate", "append", "hstack", "union"})
"""Functions of torch and numpy, and of sets, that make one of several."""


def is_end_of(node: ast.AST) -> TypeGuard[ast.Subscript]:
    """`free[:n]`, `free[-n:]`, where that is read."""
    match node:
        case ast.Subscript(slice=ast.Slice() as piece, ctx=ast.Load()):
            return _at_an_end(piece)
    return False


def _at_an_end(piece: ast.Slice) -> bool:
    negative = isinstance(piece.lower, ast.UnaryOp) and isinstance(piece.lower.op, ast.USub)
    return piece.lower is None or (negative and piece.upper is None)


def joins(value: ast.expr, whole: ast.expr) -> bool:
    """`torch.cat((self.free, pages))`, `self.free + pages`, `[*self.free, *pages]`: what is assigned is the
    field, and more."""
    match value:
        case ast.Call(func=ast.Attribute(attr=name)) if name in JOINING:
            parts: list[ast.AST] = [each for arg in value.args for each in walk(arg)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [left, right]
        case ast.List(elts=parts_of):
            parts = [each.value for each in parts_of if isinstance(each, ast.Starred)]
        case _:
            return False
    fields = [each for each in parts if isinstance(each, ast.Attribute)]
    return bool(fields) and any(ast.unparse(each) == ast.unparse(whole) for each in fields)


def left_out(value: ast.expr, whole: ast.expr) -> ast.expr | None:
    """`cursor` of `self.open = [each for each in self.open if each is not cursor]`, and of mappings `key` of
    `{k: v for k, v in self.held.items() if k != key}`."""
    match value:
        case ast.ListComp(generators=[one]) | ast.SetComp(generators=[one]) | ast.DictComp(generators=[one]):
            pass
        case ast.Call(args=[ast.GeneratorExp(generators=[one])]):
            pass
        case _:
            return None
    over = (
        one.iter.func.value
        if isinstance(one.iter, ast.Call) and isinstance(one.iter.func, ast.Attribute)
        else one.iter
    )
    if ast.unparse(gone_over(over)) != ast.unparse(whole):
        return None
    for test in one.ifs:
        match test:
            case ast.Compare(
                left=ast.Name() | ast.Attribute(), ops=[ast.IsNot() | ast.NotEq() | ast.NotIn()]
            ):
                return test.comparators[0]
    return None


def is_cut(method: Function, store: str) -> bool:
    """It assigns to the field, or deletes a part of it."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == store
        and (not isinstance(node.ctx, ast.Load) or id(node) in _deleted_of(method))
        for node in method.nodes
    )


def _deleted_of(method: Function) -> set[int]:
    return {
        id(target.value)
        for node in method.statements
        if isinstance(node, ast.Delete)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    }


def cuts_spans(method: Function, store: str) -> bool:
    """`self.gaps[i] = (start + n, size - n)`: the first part of a gap goes, and the rest stays."""
    return any(
        _is_rest(value)
        for target, value in assignments(method)
        if isinstance(target, ast.Subscript) and own_attribute(target.value, method.owner or "") == store
    )


def is_whole_at_first(method: Function, store: str) -> bool:
    """`self.gaps = [(0, size)]`: what begins empty is filled with work, of which parts are done."""
    return any(
        own_attribute(target, method.owner or "") == store
        and any(isinstance(each, ast.List) and each.elts for each in walk(value))
        for target, value in assignments(method)
    )


def _is_rest(value: ast.expr) -> bool:
    match value:
        case ast.Tuple(
            elts=[
                ast.BinOp(op=ast.Add(), right=ast.Name(id=cut)),
                ast.BinOp(op=ast.Sub(), right=ast.Name(id=less)),
            ]
        ):
            return cut == less
    return False


def leaves_a_rest(span: ast.expr) -> bool:
    """`(low + n, high)`, `(low + n, size - n)`; `(low + n, high + n)` is as large as it was."""
    ends = span.elts if isinstance(span, ast.Tuple) else []
    reckoned = [each for each in ends if isinstance(each, ast.BinOp)]
    return bool(reckoned) and not all(
        isinstance(each, ast.BinOp) and isinstance(each.op, ast.Add) for each in ends
    )


def gone_over(over: ast.expr) -> ast.expr:
    """The container of `enumerate(self.idle)` and of `list(self.idle)`."""
    match over:
        case ast.Call(
            func=ast.Name(id="enumerate" | "list" | "reversed" | "tuple" | "sorted"), args=[each, *_]
        ):
            return gone_over(each)
    return over
