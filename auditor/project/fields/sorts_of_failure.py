"""Which sorts of exceptions an exit method asks for."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.modules import last_part
from auditor.source.nodes import walk


def sorts_named(test: ast.expr, told: Set[str]) -> set[str]:
    """Names by which it speaks of them: `issubclass(kind, sqlite3.Error)`, `kind is asyncio.TimeoutError`.
    `told` are the names of what the method is told."""
    sorts = [
        each
        for call in walk(test)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("issubclass", "isinstance")
        for each in call.args[1:]
    ]
    named = (node for each in (*sorts, *_compared(test, told)) for node in walk(each))
    return {node.id for node in named if isinstance(node, ast.Name)}


def _compared(test: ast.expr, told: Set[str]) -> Iterator[ast.expr]:
    match test:
        case ast.Compare(left=ast.Name(id=kind), comparators=[ast.Name() | ast.Attribute() as sort]):
            if kind in told and last_part(sort)[:1].isupper():
                yield sort
