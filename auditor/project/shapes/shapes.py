"""Pools told by their shape: two methods that undo one another's work on one field, whatever they are called.

A free list: one takes out and hands out, the other puts in what it is told, and the list is called free, is
full from the start, or something new is made where it is empty (a queue or a stack is none of these). Places:
one finds and marks a place (in a table, a set, a number's bits) and says which, the other clears the place it
is told; or they are linked, piled, or say themselves that they are in use. A count: one counts up and hands
out something new, the other is told something and counts down. A register: one makes, records and hands out,
the other takes out of the record; so do catalogues, so the names must belong together, too. Two lists: one
takes out of the first, the other, so called, puts into the second.
"""

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from auditor.project.code.bindings import own_attribute, ways
from auditor.project.code.modules import Function
from auditor.project.shapes.amounts import carries_the_amount, tickets
from auditor.project.shapes.field_work import FieldWork, Put, field_work
from auditor.project.shapes.for_good import takes_for_good
from auditor.project.shapes.full_at_first import (
    beginning,
    full_at_first,
    given_at_first,
    given_to_a_pool,
    things_to_do,
)
from auditor.project.shapes.linked_stores import linked_again, piled_again
from auditor.project.shapes.made_new import is_new, makes_where_empty
from auditor.project.shapes.marked_places import (
    clears,
    keeps_count,
    marked_fields,
    marks,
    marks_back,
    says_what_happened,
    searches_and_marks,
)
from auditor.project.shapes.markings import FREE
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.own_helpers import by_name
from auditor.project.shapes.pieces import cuts_spans, is_cut, is_whole_at_first
from auditor.project.shapes.registers import registers, strikes
from auditor.project.shapes.rings import ringed_again
from auditor.project.shapes.spans import cut_into_spans
from auditor.project.shapes.states import states
from auditor.project.shapes.stocked import stocked_with_memory
from auditor.project.shapes.use_flags import entries
from auditor.project.shapes.within import only_adds_within, takes_within
from auditor.protocols.vocabulary import ends, negates, split, undoes

ENDING = re.compile(
    r"_*(?:evict|drain|clear|purge|trim|shrink|prune|expire|close|shutdown|remove|discard|drop|delete|finish"
    r"|complete|end|collect|extract)"
    r"|(?:read|readline|readlines|popitem|sample)$|on_"
)
"""Names of methods that hand out what is to go for good, as every file's and dict's do; and of handlers."""

SHOWING = frozenset({"__iter__", "__getitem__"})
"""By these an object shows what it has, as a list does: it is a collection, and no pool, of that."""

LENGTHS = frozenset({"len", "length", "size"})
"""Words in the names of how many something has."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The methods that hand out, and those that are given it back."""

    takers: tuple[Function, ...]
    givers: tuple[Function, ...]


def shapes(methods: Sequence[Function]) -> Iterator[Shape]:
    """One for each field of a class, of which these are methods, that is worked on like a pool's."""
    works = [field_work(method) for method in methods]
    begun = beginning(works)
    named = [work for work in works if not work.method.name.startswith("__")]
    lending = [work for work in named if not ENDING.match(work.method.name)]
    helpers = by_name(works)
    queues: set[str] = set()
    shown = [method for method in methods if method.name in SHOWING]
    for name in sorted({name for work in named for name, _ in work.taken}):
        if any(re.search(rf"\.{name}\b", method.text) for method in shown):
            continue
        takers = [work for work in lending if _takes_out_of(work, name)]
        stocked = stocked_with_memory(begun, helpers, name)
        givers = [w for w in named if _puts_into(w, name) and w not in takers and (stocked or w not in begun)]
        takers = [work for work in takers if takes_for_good(work, name, helpers)]
        givers = givers if any(takes_within(work, name) for work in takers) else _at_the_top(givers, name)
        if takers and givers:
            brought = given_at_first(begun, name) and (
                _there_and_back(name, takers, givers, named) or _called_so(name, takers, givers)
            )
            back = brought or given_to_a_pool(begun, takers[0].method.cls, name)
            free = _is_free(name, takers, begun) or _is_cut_up(name, takers, begun)
            if back or stocked or free or _named_as_halves(takers, givers):
                yield Shape(_methods(takers), _methods(_not_undone(givers)))
            else:
                queues.update(work.method.name for work in (*takers, *givers))
    yield from _put_elsewhere(lending, named, begun, works)
    for taker, givers in cut_into_spans(lending, named, begun):
        yield from _shape([taker], givers)
    lending = [work for work in lending if work.method.name not in queues]
    given = [work for work in named if work.method.name not in queues]
    for taker, givers in states(lending, given):
        yield from _shape([taker], givers)
    yield from _places(lending, given)
    yield from _marked(lending, given, begun)
    yield from _undone(lending, given, begun)
    yield from _counts(lending, given)
    for taker, givers in tickets(lending, given):
        yield from _shape([taker], givers)
    for taker, giver in registers(lending, given):
        yield from _shape([taker], [giver])


def _shape(takers: Sequence[FieldWork], givers: Sequence[FieldWork]) -> Iterator[Shape]:
    """Not the wrong way round: `unload` and `load` undo one another."""
    names = [work.method.name for work in givers]
    lending = [work for work in takers if not any(ends(work.method.name, name) for name in names)]
    if lending and givers:
        yield Shape(_methods(lending), _methods(givers))


def _not_undone(givers: Sequence[FieldWork]) -> list[FieldWork]:
    """`carve` puts back what is left over, and `uncarve` what `carve` took: only the second gives back."""
    names = [work.method.name for work in givers]
    return [work for work in givers if not any(undoes(name, work.method.name) for name in names)]


def _at_the_top(givers: Sequence[FieldWork], name: str) -> list[FieldWork]:
    """`self.slots.popleft()` takes a whole slot, into which `self.slots[delay].append(timer)` puts things."""
    return [work for work in givers if not only_adds_within(work, name)]


def _methods(works: Sequence[FieldWork]) -> tuple[Function, ...]:
    return tuple(work.method for work in works)


# Free lists -------------------------------------------------------------------------------------------------


def _takes_out_of(work: FieldWork, name: str) -> bool:
    """A slice is taken out of what is called free, or of what it is cut off; of a text it is a piece."""
    if not any(each == name for each, _ in work.taken):
        return False
    free = not FREE.isdisjoint(split(name)) or is_cut(work.method, name)
    taken = {id(node) for each, node in work.taken if each == name and (free or not _is_slice(node))}
    return bool(taken) and work.hands_out(taken)


def _is_slice(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def _puts_into(work: FieldWork, name: str) -> bool:
    """What it is told, or something of it."""
    return any(work.is_from_told(put.thing) for put in work.put if put.field == name)


def _is_free(name: str, takers: Sequence[FieldWork], begun: Sequence[FieldWork]) -> bool:
    return (
        not FREE.isdisjoint(split(name))
        or full_at_first(begun, takers[0].method, name)
        or any(makes_where_empty(work, name, _counters(begun)) for work in takers)
    )


def _is_cut_up(name: str, takers: Sequence[FieldWork], begun: Sequence[FieldWork]) -> bool:
    """First fit: `self.gaps[i] = (start + n, size - n)` of one gap that is all there is at first."""
    whole = any(is_whole_at_first(work.method, name) for work in begun)
    return whole and any(cuts_spans(work.method, name) for work in takers)


def _named_as_halves(takers: Sequence[FieldWork], givers: Sequence[FieldWork]) -> bool:
    """`carve` and `uncarve`: no queue is called so."""
    return any(negates(giver.method.name, taker.method.name) for taker in takers for giver in givers)


def _there_and_back(
    name: str, takers: Sequence[FieldWork], givers: Sequence[FieldWork], named: Sequence[FieldWork]
) -> bool:
    """What leaves the list of those at rest is in a list of those at work until it comes back; a task that is
    struck off the second list without coming back is done."""
    kept = {put.field for work in takers for put in work.put if _comes_from(work, name, put)} - {name}
    return any(
        any(strikes(work, other) for work in givers)
        and all(work in givers for work in named if strikes(work, other))
        for other in kept
    )


def _called_so(name: str, takers: Sequence[FieldWork], givers: Sequence[FieldWork]) -> bool:
    """`hire()` and `dismiss(crane)`; a task that is claimed may be released to be tried again."""
    return not things_to_do(takers[0].method.cls, name) and any(
        undoes(giver.method.name, taker.method.name) for taker in takers for giver in givers
    )


def _comes_from(work: FieldWork, name: str, put: Put) -> bool:
    taken = {id(node) for each, node in work.taken if each == name}
    return mentions(put.value, work.derived(frozenset(), taken), taken)


def _counters(begun: Sequence[FieldWork]) -> set[str]:
    return set().union(*(work.counters for work in begun))


# Places, counts ----------------------------------------------------------------------------------


def _places(lending: Sequence[FieldWork], given: Sequence[FieldWork]) -> Iterator[Shape]:
    fields = {put.field for work in lending for put in work.put if put.key is not None}
    for name in sorted(each for each in fields if not says_what_happened(each)):
        takers = [work for work in lending if any(marks(work, put) for put in work.put if put.field == name)]
        givers = [work for work in given if any(clears(work, put) for put in work.put if put.field == name)]
        if takers and givers:
            yield from _shape(takers, [work for work in givers if work not in takers])


def _marked(
    lending: Sequence[FieldWork], given: Sequence[FieldWork], begun: Sequence[FieldWork]
) -> Iterator[Shape]:
    for name, on in marked_fields(lending):
        if not any(marks_back(work, name, on) for work in given if work not in begun):
            continue
        for taker in (work for work in lending if searches_and_marks(work, name, on)):
            givers = [
                work
                for work in given
                if work is not taker and work not in begun
                if marks_back(work, name, on) and keeps_count(taker, work, name, on, begun)
            ]
            yield from _shape([taker], givers)


def _undone(
    lending: Sequence[FieldWork], given: Sequence[FieldWork], begun: Sequence[FieldWork]
) -> Iterator[Shape]:
    """Linked places, piles with a number for their top, entries that say whether they are in use."""
    for taker, givers in linked_again(lending, given):
        back = [work for work in givers if work is not taker]
        if back:
            yield Shape(_methods([taker]), _methods(back))  # `unhook()` hands out what `hook(node)` is told
    for undone in (piled_again, entries):
        for taker, givers in undone(lending, given):
            yield from _shape([taker], [work for work in givers if work is not taker])
    for taker, givers in ringed_again(lending, given, begun):
        yield from _shape([taker], givers)


def _counts(lending: Sequence[FieldWork], given: Sequence[FieldWork]) -> Iterator[Shape]:
    """One by one; amounts are counted up and down everywhere, so there the names must belong together, or
    what is handed out says how much it was. A length is of members, which stay: `graph.create_node()`."""
    for name in sorted({name for work in lending for name, _ in work.counted}):
        if not LENGTHS.isdisjoint(split(name)):
            continue
        for way in (1, -1):
            takers = [work for work in lending if (name, way) in work.counted and _hands_out_new(work, name)]
            givers = [work for work in given if (name, -way) in work.counted and work.told]
            if not {id(work) for work in takers} & {id(work) for work in givers}:
                for taker in takers:
                    yield from _shape([taker], [giver for giver in givers if _balanced(taker, giver, name)])


def _balanced(taker: FieldWork, giver: FieldWork, counter: str) -> bool:
    one_by_one = counter not in taker.summed and counter not in giver.summed
    named = ends(giver.method.name, taker.method.name)
    return one_by_one or named or carries_the_amount(taker, giver, counter)


def _hands_out_new(work: FieldWork, counter: str) -> bool:
    """Or something out of one of the fields: not what it was told, nor the count itself."""
    taken = {id(node) for _, node in work.taken}
    counted = {field for field, _ in work.counted} - {counter}
    names = work.derived(frozenset(), taken)
    given = {
        target.id
        for node in work.method.nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and any(is_new(way, counted) for way in ways(node.value))
    }
    return any(
        is_new(way, counted) or mentions(way, names | given, taken)
        for value in work.returned
        for way in ways(value)
    )


def _put_elsewhere(
    lending: Sequence[FieldWork],
    given: Sequence[FieldWork],
    begun: Sequence[FieldWork],
    works: Sequence[FieldWork],
) -> Iterator[Shape]:
    """`next_frame` takes out of the full ones, `return_frame` puts into the empty ones; whatever the two are
    called, where those are filled up again from these: `self.idle.update(self.cooling)`, or a worker takes an
    empty one, fills it and puts it there."""
    for taker in lending:
        sources = {name for name, _ in taker.taken if _takes_out_of(taker, name)}
        for giver in given if sources else ():
            kept = {put.field for put in giver.put if _puts_into(giver, put.field)}
            full = {name for name in sources if kept and full_at_first(begun, taker.method, name)}
            again = any(_is_filled_from(work, full, kept) for work in given if full)
            called = undoes(giver.method.name, taker.method.name)
            blank = {name for name in kept if full_at_first(begun, taker.method, name)}
            again = again or any(_refills(work, sources, blank) for work in works if blank)
            if kept and sources.isdisjoint(kept) and (called or again):
                yield from _shape([taker], [giver])


def _refills(work: FieldWork, sources: Set[str], kept: Set[str]) -> bool:
    """`slot = self.slots[self.blank.get()]`, filled, and `self.filled.put(slot)`"""
    taken = {id(node) for name, node in work.taken if name in kept}
    made = work.derived(frozenset(), taken) if taken else frozenset()
    return bool(taken) and any(put.field in sources and mentions(put.value, made, taken) for put in work.put)


def _is_filled_from(work: FieldWork, sources: Set[str], kept: Set[str]) -> bool:
    """`self.idle.update(self.cooling)`, or one by one: `self.ready.append(self.dirty.pop())`."""
    if not any(put.field in sources for put in work.put):
        return False
    own = work.method.owner or ""
    marked = {id(node) for node in work.method.of_kind(ast.Attribute) if own_attribute(node, own) in kept}
    made = work.derived(frozenset(), marked) if marked else frozenset()
    return bool(marked) and any(
        put.field in sources and mentions(put.value, made, marked) for put in work.put
    )
