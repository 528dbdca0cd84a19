"""Further methods that take out of a store into which a known releaser puts: `alloc_aligned` beside
`alloc_pages`, `lend_fresh` beside `lend`."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import FieldWork, Put, field_work
from auditor.project.shapes.for_good import takes_for_good
from auditor.project.shapes.full_at_first import beginning, full_at_first
from auditor.project.shapes.marked_places import marked_fields, marks_back, searches_and_marks
from auditor.project.shapes.own_helpers import all_put, by_name
from auditor.project.shapes.shapes import ENDING
from auditor.project.shapes.stocked import stocked_with_memory
from auditor.protocols.vocabulary import RELEASE_WORDS, split, take_apart


def joint_takers(methods: Sequence[Function], givers: Sequence[Function]) -> Iterator[Function]:
    """Those among the methods of a class that hand out what came from where the givers put it back."""
    works = [field_work(method) for method in methods]
    begun = beginning(works)
    named = by_name(works)
    giving = [work for work in works if work.method in givers]
    stores = {put.field for work in giving for put, _ in all_put(work, named) if _puts_back(work, put)}
    fixed = any(
        full_at_first(begun, work.method, store) or stocked_with_memory(begun, named, store)
        for work in works[:1]
        for store in stores
    )
    for work in works:
        if work in giving or work in begun or not _may_take(work.method, fixed):
            continue
        taken = any(takes_for_good(work, store, named) for store in sorted(stores))
        if taken or any(_marks(work, giving, field, on) for field, on in marked_fields([work])):
            yield work.method


def _puts_back(work: FieldWork, put: Put) -> bool:
    """What it is told; a table whose values are None is a set in an order."""
    kept = put.key if isinstance(put.value, ast.Constant) and put.value.value is None else put.value
    return kept is not None and work.is_from_told(kept)


def taken_fields(methods: Sequence[Function]) -> set[str]:
    """Fields out of which one of them takes what it may hand out, or marks it there."""
    works = (field_work(method) for method in methods)
    return {field for work in works if work.returned for field in _touched(work)}


def are_filled(fields: Set[str], methods: Sequence[Function]) -> bool:
    """Whether one of them puts what it is told into one of these fields, or marks that there."""
    works = [work for method in methods if (work := field_work(method)).told]
    filled = {put.field for work in works for put in work.put}
    return not fields.isdisjoint(filled.union(*(_touched(work) for work in works)))


def _touched(work: FieldWork) -> Iterator[str]:
    yield from (field for field, _ in work.taken)
    yield from (mark.field for mark in work.marked)


def _may_take(method: Function, fixed: bool) -> bool:
    """What is evicted is lost to a pool that makes no more of it."""
    name = method.name
    if name.startswith("__"):
        return False
    if fixed and split(name)[:1] == ("evict",):
        return True
    return not ENDING.match(name) and take_apart(name, RELEASE_WORDS) is None


def _marks(work: FieldWork, giving: Sequence[FieldWork], field: str, on: bool) -> bool:
    return searches_and_marks(work, field, on) and any(marks_back(each, field, on) for each in giving)
