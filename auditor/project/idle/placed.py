"""Stocks without a list of what is free: places that are marked in a table or a number, and heads of chains
that move on. Of these, too, a method may take one and forget it."""

import ast
from collections.abc import Iterator, Sequence
from itertools import islice

from auditor.project.code.bindings import assigned_by, given_to, own_attribute
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Class, last_part
from auditor.project.idle.stock import Stock, begun_and_later
from auditor.project.idle.takes import Take
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.linked_stores import linked_again, unlinked
from auditor.project.shapes.marked_places import keeps_count, marked_fields, marks_back, searches_and_marks
from auditor.project.shapes.shapes import ENDING
from auditor.source.nodes import walk


def placed_stock(lineage: Lineage, cls: Class) -> Stock | None:
    """Of a class that keeps its places so, if nobody makes new ones."""
    begun, later = begun_and_later(lineage, cls)
    named = [work for work in later if not work.method.name.startswith("__")]
    heads = {head for work, _ in linked_again(named, named) for head, _ in unlinked(work)}
    if heads and not _makes_more(begun, later, heads):
        return Stock(cls, frozenset(heads), tuple(later), full=frozenset(heads))
    marks = frozenset(_marks(begun, named))
    fields = frozenset(field for field, _ in marks)
    return Stock(cls, fields, tuple(later), full=fields, marks=marks) if fields else None


def _makes_more(begun: Sequence[FieldWork], later: Sequence[FieldWork], heads: set[str]) -> bool:
    """Whether nothing is in the chain at first, or what is made at first is made later, too."""
    given = [
        value
        for work in begun
        for node in work.method.statements
        for target, value in assigned_by(node)
        if own_attribute(target, work.method.owner or "") in heads
        if not (isinstance(value, ast.Constant) and value.value is None)
    ]
    makers = {last_part(call.func) for value in given for call in walk(value) if isinstance(call, ast.Call)}
    again = {last_part(call.func) for work in later for call in work.method.calls}
    return not given or not makers.isdisjoint(again)


def _marks(begun: Sequence[FieldWork], named: Sequence[FieldWork]) -> Iterator[tuple[str, bool]]:
    lending = [work for work in named if not ENDING.match(work.method.name)]
    for field, on in marked_fields(lending):
        takers = [work for work in lending if searches_and_marks(work, field, on)]
        givers = [w for w in named if w not in takers and marks_back(w, field, on)] if takers else []
        if any(keeps_count(taker, giver, field, on, begun) for taker in takers for giver in givers):
            yield field, on


def placed_takes(stock: Stock, work: FieldWork) -> Iterator[Take]:
    """`self.head = node.next` of `node = self.head`; `self.used[place] = True`, `self.bits |= 1 << place`."""
    own = work.method.owner or ""
    heads = {head: name for head, name in unlinked(work) if head in stock.fields}
    for node in work.method.statements:
        for target, _ in assigned_by(node) if heads else ():
            head = own_attribute(target, own) or ""
            for shown in _named(work, own, head, heads[head]) if head in heads else ():
                yield Take(node, shown, heads[head])
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            yield from _marked(stock, work, node)


def _named(work: FieldWork, own: str, head: str, name: str) -> Iterator[ast.expr]:
    given = (value for value in given_to(work.method, name) if own_attribute(value, own) == head)
    return islice(given, 1)


def _marked(stock: Stock, work: FieldWork, node: ast.Assign | ast.AugAssign) -> Iterator[Take]:
    inside = {id(part) for part in walk(node)}
    shown = node.targets[0] if isinstance(node, ast.Assign) else node.target
    for mark in work.marked:
        if (mark.field, mark.on) in stock.marks and id(mark.place) in inside:
            names = {each.id for each in walk(mark.place) if isinstance(each, ast.Name)}
            if len(names) == 1 and searches_and_marks(work, mark.field, mark.on):
                yield Take(node, shown, names.pop())
