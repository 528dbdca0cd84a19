"""What is kept where there is no other: `session.link = pool.take() or session.link`."""

import ast
from collections.abc import Iterator

from auditor.project.fields.filling_again import same
from auditor.source.nodes import walk


def kept_for_want_of_another(value: ast.expr, target: ast.expr) -> set[int]:
    """The nodes, by their ids, that read the place which the value is stored in, to leave it as it is: that
    does nothing to what is there where another one comes."""
    return {id(node) for each in _instead(value) if same(each, target) for node in walk(each)}


def _instead(value: ast.expr) -> Iterator[ast.expr]:
    match value:
        case ast.BoolOp(op=ast.Or(), values=[*_, last]):
            yield last
        case ast.IfExp(test=ast.Name() | ast.Compare(ops=[ast.IsNot()]), orelse=last):
            yield last
