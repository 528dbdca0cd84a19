"""Records that a method is told, strikes off its table, and of which it ends what they hold:

def finish(self, sequence):
    self.running.pop(sequence.number, None)
    for block in sequence.blocks:
        self.table.drop(block)
"""

import ast
from collections.abc import Iterable, Iterator, Set

from auditor.project.code.bindings import gone_through, own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def ends_whom_it_strikes_off(method: Function, attribute: str, ends: Set[str]) -> bool:
    """`del self.rows[node.key]` of a node that it is told, and `node.row.give()` behind that."""
    told = set(method.parameters[1:])
    struck = dict(_struck_off(method, attribute))
    return any(
        call.lineno > struck[name]
        for call in method.calls
        if last_name(call) in ends
        for name in _given_or_asked(method, call) & told & struck.keys()
    )


def _struck_off(method: Function, attribute: str) -> Iterator[tuple[str, int]]:
    """`del self.rows[node.key]`, `self.rows.pop(node.key, None)`, `self.rows.remove(node)`."""
    own = method.owner or ""
    for node in method.nodes:
        match node:
            case ast.Subscript(value=table, slice=ast.Attribute(value=ast.Name(id=name)), ctx=ast.Del()):
                pass
            case ast.Call(
                func=ast.Attribute(value=table, attr="pop"), args=[ast.Attribute(value=ast.Name(id=name)), *_]
            ):
                pass
            case ast.Call(
                func=ast.Attribute(value=table, attr="remove" | "discard"), args=[ast.Name(id=name)]
            ):
                pass
            case _:
                continue
        if own_attribute(table, own) == attribute:
            yield name, node.lineno


def _given_or_asked(method: Function, call: ast.Call) -> set[str]:
    """Names of the objects of which something is asked to end, or is told to end, at once or one by one."""
    asked = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    parts = [asked, *call.args]
    each = [over for part in parts if isinstance(part, ast.Name) for over in gone_through(method, part.id)]
    return set(_whose(parts)) | set(_whose(each))


def _whose(parts: Iterable[ast.expr]) -> Iterator[str]:
    for part in parts:
        for node in walk(part):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield node.value.id
