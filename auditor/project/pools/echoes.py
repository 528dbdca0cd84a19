"""Calls that return what they mark: `node = node.lock()`, `pages = store.share(pages)`."""

import ast

from auditor.flow.effects import Handle
from auditor.project.code.bindings import is_dropped
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Pair
from auditor.source.nodes import walk


def echoed(handle: Handle, function: Function, call: ast.Call, pair: Pair) -> Handle:
    """How such a call acquires. Nobody may ask for the result; of those that a loop goes over it is what is
    returned, if that is ended."""
    if is_dropped(function, call):
        return Handle.ARGUMENT if handle is Handle.RESULT else handle
    marked = _marked(handle, call)
    if (_of_a_loop(function, marked) or _unnamed(marked)) and not _ends_the_same(function, marked, pair):
        return Handle.RESULT
    return handle


def _marked(handle: Handle, call: ast.Call) -> ast.expr | None:
    """What stands for the object: the receiver, or what is told first."""
    if handle is Handle.ARGUMENT:
        return call.args[0] if call.args else None
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _unnamed(marked: ast.expr | None) -> bool:
    """`block = store.share(table[key])`: nobody else has a name for it."""
    return isinstance(marked, ast.Subscript | ast.Call)


def _of_a_loop(function: Function, marked: ast.expr | None) -> bool:
    """`session.handle.lock()` of each session that a loop or a comprehension goes over."""
    root = marked
    while isinstance(root, ast.Attribute):
        root = root.value
    return any(
        isinstance(name, ast.Name) and isinstance(root, ast.Name) and name.id == root.id
        for node in function.nodes
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension)
        for name in walk(node.target)
    )


def _ends_the_same(function: Function, marked: ast.expr | None, pair: Pair) -> bool:
    """Whether the function calls an end of that object by the same name: `session.handle.unlock()`."""
    ways_back = {half.function.name for half in pair.releases}
    text = ast.unparse(marked) if marked is not None else ""
    return any(
        isinstance(other.func, ast.Attribute)
        and other.func.attr in ways_back
        and text in map(ast.unparse, (other.func.value, *other.args[:1]))
        for other in function.calls
    )
