"""Methods that are handed to a thread, which calls them: `await asyncio.to_thread(pool.acquire, 8)`,
`future = executor.submit(pool.acquire, 8)`."""

import ast
import re
from collections.abc import Iterator

POSITIONS = {"to_thread": 0, "submit": 0, "run_in_executor": 1}
"""Where such a call is told the method; its arguments follow."""

_TOLD = re.compile(
    r"\b(?:(to_thread|submit)\(|(run_in_executor)\(\s*[\w.]+\s*,)\s*(?:\w+\.)*(\w+)\s*[,)]",
)


def ways_to_call(text: str) -> Iterator[tuple[str, str]]:
    """Last names of methods with those of the calls that are told them."""
    for told in _TOLD.finditer(text) if any(f"{way}(" in text for way in POSITIONS) else ():
        yield told[3], told[1] or told[2]


def called_elsewhere(call: ast.Call) -> ast.Call | None:
    """What the thread calls, written as if it were called here."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in POSITIONS or len(call.args) <= POSITIONS[name]:
        return None
    method, *told = call.args[POSITIONS[name] :]
    if not isinstance(method, (ast.Attribute, ast.Name)):
        return None
    return ast.copy_location(ast.Call(method, told, call.keywords), call)
