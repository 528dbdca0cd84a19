"""What is begun under a key that only some ways enter into the object's own books:

    self.rows.create(seq, len(prompt))         def finish(self, seq):
    if not self.model.accepts(prompt):             tokens = self.live.pop(seq)
        return False                               self.rows.release(seq)
    self.live[seq] = list(prompt)

Whoever ends it takes the key out of the books first. On a way that does not enter it, nobody will ask."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.follow import Followed
from auditor.flow.lease import Loss
from auditor.flow.trace import shortest_path
from auditor.ir.ops import Op, Store
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import field_work


def lines_not_entered(function: Function, acquire: ast.Call, ends: Set[str], followed: Followed) -> set[int]:
    """Of returns on ways that leave the key out of the books. `ends` are the names of what ends it."""
    books = _books(function, acquire) & _asked_by_ends(function, acquire, ends)
    if not books:
        return set()
    graph = function.graph
    found = set()
    for loss, node, held in followed.endings.lost:
        out = graph.ops[node].at
        if loss is Loss.RETURN and isinstance(out, ast.Return):
            way = [graph.ops[at.node] for at in shortest_path(graph, followed.solution, node, held)]
            if books.isdisjoint(_entered_on(way, function.owner or "")):
                found.add(out.lineno)
    return found


def _key(call: ast.Call) -> str:
    return call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""


def _books(function: Function, acquire: ast.Call) -> set[str]:
    """Tables of the object into which something is put under the key behind the acquire."""
    key = _key(acquire)
    return {
        field
        for target, _ in assignments(function)
        if isinstance(target, ast.Subscript) and target.lineno > acquire.lineno
        if key and getattr(target.slice, "id", "") == key
        if (field := own_attribute(target.value, function.owner or "")) is not None
    }


def _asked_by_ends(function: Function, acquire: ast.Call, ends: Set[str]) -> set[str]:
    """Tables out of which those methods take a key that end it, of the same object."""
    found: set[str] = set()
    whom = ast.unparse(acquire.func.value) if isinstance(acquire.func, ast.Attribute) else ""
    others = function.cls.methods.values() if function.cls is not None and whom else ()
    for method in others:
        keys = {
            _key(call)
            for call in method.calls
            if last_part(call.func) in ends
            and isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value) == whom
        } - {""}
        if method is not function and keys:
            found |= {field for field, key in field_work(method).removed if getattr(key, "id", "") in keys}
    return found


def _entered_on(way: Sequence[Op], own: str) -> Iterator[str]:
    for op in way:
        match op:
            case Store(target=(root, field, _)) if root == own:
                yield field[1:]
