"""Stores without a list of what is free: each free place knows the next one, or a number says where they
end."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.name_bindings import mentions
from auditor.source.nodes import walk

Taken = tuple[FieldWork, list[FieldWork]]
"""A method that takes, and those that give back."""


def linked_again(lending: Sequence[FieldWork], given: Sequence[FieldWork]) -> Iterator[Taken]:
    """`at = self.head; self.head = self.next[at]`, and `self.next[at] = self.head; self.head = at` of a place
    that it is told."""
    heads = {head for work in given if work.told for head in _linked(work)}
    for taker in lending if heads else ():
        of_taker = {head for head, _ in unlinked(taker)} & heads
        if of_taker:
            yield taker, [work for work in given if not of_taker.isdisjoint(_linked(work))]


def unlinked(work: FieldWork) -> Iterator[tuple[str, str]]:
    """The heads that a method moves on, with the name that it hands out."""
    own = work.method.owner or ""
    pairs = list(assignments(work.method))
    for target, value in pairs:
        head = own_attribute(_where(value), own)
        if head is None or not isinstance(target, ast.Name):
            continue
        names = work.derived({target.id}, frozenset())
        moved = any(
            own_attribute(other, own) == head
            and isinstance(place := _as_it_lies(follower), ast.Attribute | ast.Subscript)
            and (mentions(place, names, frozenset()) or _reads(work, place, head))
            for other, follower in pairs
        )
        if moved and any(mentions(each, names, frozenset()) for each in work.returned):
            yield head, target.id


def _where(value: ast.expr) -> ast.expr:
    """`self.head` of `self.chunks[self.head]`, of which the place stands in what lies there."""
    return value.slice if isinstance(value, ast.Subscript) else value


def _as_it_lies(follower: ast.expr) -> ast.expr:
    """`self.next[at]` of `int(self.next[at])` and of `self.next[at].item()`."""
    match follower:
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return _as_it_lies(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
            return inner
    return follower


def _linked(work: FieldWork) -> Iterator[str]:
    """The heads that a method sets to what it is told, which has the one before for its follower."""
    own = work.method.owner or ""
    pairs = list(assignments(work.method))
    for target, value in pairs:
        head = own_attribute(value, own)
        follows = isinstance(target, ast.Attribute | ast.Subscript) and work.is_from_told(target)
        set_to_told = (
            own_attribute(other, own) == head and work.is_from_told(given) for other, given in pairs
        )
        if head is not None and follows and any(set_to_told):
            yield head


def piled_again(lending: Sequence[FieldWork], given: Sequence[FieldWork]) -> Iterator[Taken]:
    """`self.top -= 1; return self.rest[self.top]`, and `self.rest[self.top] = place; self.top += 1`."""
    for taker in (work for work in lending if work.counted):
        yield taker, [work for work in given if work.counted and _is_piled_again(taker, work)]


def _is_piled_again(taker: FieldWork, giver: FieldWork) -> bool:
    tops = {name for name, way in taker.counted if (name, -way) in giver.counted}
    return any(
        put.field in _handed_out_at(taker, top)
        for top in tops
        for put in giver.put
        if put.key is not None and _reads(giver, put.key, top) and giver.is_from_told(put.value)
    )


def _handed_out_at(work: FieldWork, top: str) -> set[str]:
    """Tables of which it hands out what stands at that number."""
    own = work.method.owner or ""
    read = [
        (table, node)
        for node in work.method.nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        if (table := own_attribute(node.value, own)) is not None and _reads(work, node.slice, top)
    ]
    return {table for table, node in read if work.hands_out({id(node)})}


def _reads(work: FieldWork, node: ast.expr, field: str) -> bool:
    own = work.method.owner or ""
    return any(isinstance(each, ast.expr) and own_attribute(each, own) == field for each in walk(node))
