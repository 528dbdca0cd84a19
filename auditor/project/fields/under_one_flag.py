"""`begin` and `finish` that ask the same setting: `if self.chunked: self.stage = pool.take()`, and where the
stage is given back `if self.chunked:` again. Whoever begins anew has finished, whatever the setting says."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.reckoning import comes_in_pairs
from auditor.source.nodes import walk


def under_one_flag(filling: Filling, enders: Sequence[Function], family: Sequence[Function]) -> bool:
    """Nobody but the constructor sets it, and every end asks it as well."""
    flags = set(_flags_around(filling.method, filling.statement))
    later = [each for each in family if each.name not in INITIAL]
    flags -= {
        node.attr
        for each in later
        for node in each.nodes
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }
    asked = bool(flags) and all(not flags.isdisjoint(_flags_in(ender)) for ender in enders)
    return asked and bool(enders) and comes_in_pairs(filling.method.name)


def _flags_around(method: Function, statement: ast.stmt) -> Iterator[str]:
    around = (
        node
        for node in method.statements
        if isinstance(node, ast.If) and any(each is statement for part in node.body for each in walk(part))
    )
    yield from (flag for node in around if (flag := own_attribute(node.test, method.owner or "")))


def _flags_in(method: Function) -> Iterator[str]:
    asking = (node for node in method.statements if isinstance(node, ast.If))
    yield from (flag for node in asking if (flag := own_attribute(node.test, method.owner or "")))
