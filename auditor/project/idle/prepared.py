"""Work on what was taken, in the statements around the one that puts it with the others:

    block = self.free.popleft()
    block.shape = shape
    block.forget_owner()
    taken.append(block)

It is the pool's own meanwhile, and nobody else has got it by that."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import root_of
from auditor.project.code.modules import Function
from auditor.source.nodes import blocks_of, walk


def preparing(function: Function, name: str) -> frozenset[int]:
    """Ids of the places that such statements write, and of the calls that they make."""
    return frozenset(
        id(part)
        for holder in (*function.statements, function.node)
        for block in blocks_of(holder)
        if any(_puts_away(each, name) for each in block)
        for statement in block
        for part in _worked_on(statement, name)
    )


def _puts_away(statement: ast.stmt, name: str) -> bool:
    """`taken.append(block)`"""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr="append"), args=[each])):
            return getattr(each, "id", None) == name
    return False


def _worked_on(statement: ast.stmt, name: str) -> Iterator[ast.AST]:
    """`block.meta.shape = shape`, `block.forget_owner()`; not where the block itself goes anywhere."""
    match statement:
        case ast.Assign(targets=[ast.Attribute() as target], value=value) if root_of(target) == name:
            if all(getattr(part, "id", None) != name for part in walk(value)):
                yield target
        case ast.Expr(value=ast.Call(func=ast.Attribute() as way, args=[], keywords=[]) as call):
            if root_of(way) == name:
                yield call
