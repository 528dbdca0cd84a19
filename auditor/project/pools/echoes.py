"""Calls that return what they mark: `node = node.lock()`, `pages = store.share(pages)`."""

import ast

from auditor.flow.effects import Handle
from auditor.project.code.bindings import is_dropped
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Pair


def echoed(handle: Handle, function: Function, call: ast.Call, pair: Pair) -> Handle:
    """How such a call acquires. Nobody may ask for the result; of those that a loop goes over it is what is
    returned, if that is ended."""
    if is_dropped(function, call):
        return Handle.ARGUMENT if handle is Handle.RESULT else handle
    if _of_a_loop(function, call) and not _ends_the_same(function, call, pair):
        return Handle.RESULT
    return handle


def _of_a_loop(function: Function, call: ast.Call) -> bool:
    """`session.handle.lock()` of each session that a loop or a comprehension goes over."""
    root = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return any(
        isinstance(name, ast.Name) and isinstance(root, ast.Name) and name.id == root.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for name in ast.walk(node.target)
    )


def _ends_the_same(function: Function, call: ast.Call, pair: Pair) -> bool:
    """Whether the function calls an end of that object by the same name: `session.handle.unlock()`."""
    ways_back = {half.function.name for half in pair.releases}
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return any(
        isinstance(other.func, ast.Attribute)
        and other.func.attr in ways_back
        and ast.unparse(other.func.value) == receiver
        for other in function.calls
    )
