"""Tables that throw out an entry to make room for another: `if len(self.rows) >= self.limit:` and then
`self.rows.popitem(last=False)`, of which nobody asks what it returns."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.forgetting import CLEANUP
from auditor.source.nodes import walk

ENDS_OF_TABLES = frozenset({"popitem", "popleft", "pop"})


def thrown_out(method: Function, field: str, ends: Set[str]) -> Iterator[ast.Call]:
    """Where the method does so, and neither looks into an entry first nor gives anything back."""
    if CLEANUP.fullmatch(method.name) or any(_may_end(call, ends) for call in method.calls):
        return
    for asked in (node for node in method.statements if isinstance(node, ast.If | ast.While)):
        if _asks_how_many(asked.test, method, field):
            for statement in asked.body:
                match statement:
                    case ast.Expr(
                        value=ast.Call(func=ast.Attribute(value=table, attr=way), args=args) as call
                    ):
                        oldest = all(isinstance(each, ast.Constant | ast.UnaryOp) for each in args)
                        if (
                            way in ENDS_OF_TABLES
                            and oldest
                            and own_attribute(table, method.owner or "") == field
                        ):
                            yield call


def _may_end(call: ast.Call, ends: Set[str]) -> bool:
    return last_part(call.func) in ends or looks_releasing(call)


def _asks_how_many(test: ast.expr, method: Function, field: str) -> bool:
    """`len(self.rows) >= self.limit`"""
    return any(
        isinstance(node, ast.Call)
        and last_part(node.func) == "len"
        and any(own_attribute(each, method.owner or "") == field for each in node.args)
        for node in walk(test)
    )
