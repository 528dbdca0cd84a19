"""Stores that are empty at first, of a pool that makes what it lends where they hold nothing:

    block = self.spare.pop()
    if block.rows < rows:
        return None

What is passed over there for what the caller asked is as good as ever for the next one. What is broken such a
pool may drop, and a method that makes another one has replaced it."""

from collections.abc import Sequence

from auditor.project.code.modules import Class
from auditor.project.idle.stock import Stock
from auditor.project.idle.supply import Supply, comes_back_by_itself, taken_ids
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.full_at_first import full_at_first, given_at_first, things_to_do
from auditor.project.shapes.made_new import makes_where_empty


def shelf_of(cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork]) -> Stock | None:
    """The stores of a class from which one method lends, and into which another puts what it is told."""
    names = sorted({name for work in later for name, _ in work.taken})
    fields = frozenset(name for name in names if _is_shelf(cls, begun, later, name))
    lending = {work.method.name for work in later if work.hands_out(taken_ids(work, fields))}
    supplies = [Supply(work, fields, frozenset(), lending) for work in later]
    if (
        not fields
        or any(supply.brings_new() for supply in supplies)
        or comes_back_by_itself(cls, frozenset())
    ):
        return None
    givers = {work.method.name for work in later if any(_puts_into(work, name) for name in fields)}
    return Stock(
        cls,
        fields,
        tuple(later),
        givers=frozenset(givers),
        given=True,
        full=fields,
        makes_more=True,
    )


def _is_shelf(cls: Class, begun: Sequence[FieldWork], later: Sequence[FieldWork], name: str) -> bool:
    takers = [work for work in later if work.hands_out(taken_ids(work, {name}))]
    givers = [work for work in later if work not in takers and _puts_into(work, name)]
    if not takers or not givers or things_to_do(cls, name):
        return False
    filled = full_at_first(begun, takers[0].method, name) or given_at_first(begun, name)
    return not filled and any(makes_where_empty(work, name, set()) for work in takers)


def _puts_into(work: FieldWork, name: str) -> bool:
    return any(put.field == name and work.is_from_told(put.thing) for put in work.put)
