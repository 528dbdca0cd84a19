"""What a statement gives names to, and out of what."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass

from auditor.project.code.bindings import ways
from auditor.source.nodes import walk

FILLING = frozenset({"append", "appendleft", "add", "put", "put_nowait", "insert", "push", "extend",
                     "extendleft", "update", "append_n"})  # fmt: skip
"""Methods that put what they are given into their container."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Names that a statement gives a value, and what that mentions."""

    bound: frozenset[str]
    names: frozenset[str]
    nodes: frozenset[int]

    def mentions(self, names: Set[str], marked: Set[int]) -> bool:
        return not (self.names.isdisjoint(names) and self.nodes.isdisjoint(marked))


def mentions(node: ast.AST, names: Set[str], marked: Set[int]) -> bool:
    return any(
        id(inner) in marked or (isinstance(inner, ast.Name) and inner.id in names) for inner in walk(node)
    )


def bindings(node: ast.stmt) -> Iterator[Binding]:
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(
            targets
        ) == len(values):
            for target, value in zip(targets, values, strict=True):
                yield _made(set(bound_by(target)), value)
        case ast.Assign(targets=targets, value=value):
            yield _made({name for target in targets for name in bound_by(target)}, value)
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.AugAssign(target=ast.Name() as target, value=value)
            | ast.For(target=target, iter=value)
        ):
            yield _made(set(bound_by(target)), value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=into, attr=way), args=[*_, value])) if (
            way in FILLING
        ):
            yield _made({each.id for each in ways(into) if isinstance(each, ast.Name)}, value)


def _made(bound: set[str], value: ast.expr) -> Binding:
    nodes = list(walk(value))
    names = frozenset(node.id for node in nodes if isinstance(node, ast.Name))
    return Binding(frozenset(bound), names, frozenset(map(id, nodes)))


def bound_by(target: ast.expr) -> Iterator[str]:
    return (
        node.id for node in walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
