"""Methods that are told which entry of a list is to go, and give back what that one holds: `retire(seq)`
calls `self.running.remove(seq)` and `pool.give(seq.table)`."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.ir.ops import Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.elsewhere import released_attributes


def put_out_by(family: Sequence[Function], place: Path, ends: Set[str]) -> Iterator[str]:
    """Such methods of a lease at `self.running[*].table`; `ends` are what the pool's own ends are called."""
    if len(place) < 4 or not place[2].startswith("[") or not place[-1].startswith("."):
        return
    listed, held = place[1][1:], place[-1][1:]
    for method in family:
        if f".{listed}.remove(" in method.text and f".{held}" in method.text:
            known = {call for call in method.calls if getattr(call.func, "attr", "") in ends}
            holders = released_attributes(method, known=known).get(held, set())
            if not holders.isdisjoint(_removed(method, listed)):
                yield method.qualname


def _removed(method: Function, listed: str) -> Iterator[str]:
    """Parameters that are taken out of the list."""
    for call in method.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=table, attr="remove"), args=[ast.Name(id=name)]):
                if name in method.parameters[1:] and own_attribute(table, method.owner or "") == listed:
                    yield name
