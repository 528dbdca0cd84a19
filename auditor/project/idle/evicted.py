"""Tables out of which a pool takes again what it has lent: `return self.free.pop()` where there is one, and
`return self.slot_of.pop(victim)` otherwise. Nobody gives anything back to such a pool; what is not in the
table is never taken out of it again."""

import ast
from collections.abc import Sequence, Set

from auditor.project.code.bindings import own_attribute, ways
from auditor.project.idle.supply import taken_ids
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.name_bindings import mentions


def evicted_tables(works: Sequence[FieldWork], full: Set[str]) -> frozenset[str]:
    """Of a pool that is `full` at first, and to which nothing is put back by who is told it."""
    if any(put.field in full for work in works for put in work.put):
        return frozenset()
    takers = {work.method.name: tables for work in works if (tables := _taken_instead(work, full))}
    return frozenset(
        put.field
        for work in works
        for put in work.put
        if put.key is not None and mentions(put.value, *_taken_by(work, takers, put.field))
    )


def _taken_instead(work: FieldWork, full: Set[str]) -> set[str]:
    """It returns what it takes out of the store, or out of one of these; of a record that it strikes off a
    table the number that is in it, `return victim.row`."""
    returned = [way for value in work.returned for way in ways(value)]
    ids = {id(way) for way in returned}
    if not ids & taken_ids(work, full):
        return set()
    found = {name for name, node in work.taken if name not in full and id(node) in ids}
    if any(isinstance(way, ast.Attribute) and isinstance(way.value, ast.Name) for way in returned):
        found |= {name for name, _ in work.removed if name not in full}
    return found


def _taken_by(work: FieldWork, takers: dict[str, set[str]], table: str) -> tuple[Set[str], Set[int]]:
    """Names of what a method got by asking one that takes out of that table, and the calls."""
    own = work.method.owner or ""
    calls = {
        id(call): call
        for call in work.method.calls
        if table in takers.get(own_attribute(call.func, own) or "", ())
    }
    return work.derived(frozenset(), calls.keys()), calls.keys()
