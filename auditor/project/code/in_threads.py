"""Calls that a coroutine has a thread make and waits for: `await asyncio.to_thread(pool.take)` is told as
`await pool.take()`, so is `await loop.run_in_executor(None, pool.take)`."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.modules import last_part
from auditor.source.imports import dotted_text

CALLED = re.compile(r"(?:to_thread\(\s*|run_in_executor\(\s*[\w.]+,\s*)(?:\w+\.)*(\w+)")
BEFORE = {"to_thread": 0, "run_in_executor": 1}
"""So many arguments come before the function."""


def names_in_threads(text: str) -> Iterator[str]:
    """Last names of what is called so."""
    if any(way in text for way in BEFORE):
        yield from CALLED.findall(text)


def write_threads(tree: ast.Module, text: str) -> list[tuple[int, str]]:
    """Rewrites the tree; the lines and last names of the calls that now stand in it."""
    if not any(True for _ in names_in_threads(text)):
        return []
    writer = _Writer()
    writer.visit(tree)
    return writer.written


class _Writer(ast.NodeTransformer):
    def __init__(self) -> None:
        self.written: list[tuple[int, str]] = []

    def visit_Await(self, node: ast.Await) -> ast.Await:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and (called := self._called(node.value)) is not None:
            node.value = called
        return node

    def _called(self, call: ast.Call) -> ast.Call | None:
        before = BEFORE.get(last_part(call.func))
        if before is None or len(call.args) <= before:
            return None
        function, *told = call.args[before:]
        if not isinstance(function, ast.Name | ast.Attribute) or dotted_text(function) is None:
            return None
        self.written.append((call.lineno, last_part(function)))
        return ast.copy_location(ast.Call(function, told, call.keywords), call)
