"""Pairs of a class that count: users, permits, references to others' objects."""

import ast
from collections.abc import Iterator, Set
from dataclasses import replace

from auditor.flow.effects import Handle, Value
from auditor.project.code.bindings import own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import hands_out_what_ends, returns_itself, shared_key
from auditor.project.pools.halves import LENDING, Half, Pair, marking_half
from auditor.project.pools.handed_on_first import ended_by_who_gets_it
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.locks_within import gates, lock_pairs
from auditor.project.pools.told_by_itself import told_by_itself
from auditor.project.pools.used_together import asked_in_turn, used_by_its_own, used_together
from auditor.project.shapes.amounts import returns_the_amount, returns_what_it_adds
from auditor.project.shapes.born_with_one import entered_with_one
from auditor.project.shapes.credits import credits_taken, granted
from auditor.project.shapes.part_counted import part_counted
from auditor.project.shapes.pool_state import own_parameters
from auditor.project.shapes.reference_counts import (
    counts_of_itself,
    counts_of_objects,
    counts_of_what_is_returned,
    hands_out_a_key,
    reference_counts,
    returns_what_it_is_told,
)
from auditor.project.shapes.saved_marks import saved_marks
from auditor.project.shapes.under_keys import answers_what_lies_there
from auditor.project.shapes.use_counts import capacities, permits, struck_off_by_its_answer, use_counts
from auditor.protocols.vocabulary import Name, split

WAYS_OF_ASKING = frozenset({"try", "async", "wait", "nowait", "no", "blocking", "maybe", "sync", "now"})
"""Words that say how something is asked for, and not for what."""


def counted_pairs(
    model: ClassModel, cls: Class, methods: list[Function], paired: set[Function]
) -> Iterator[Pair]:
    """`begin_request` and `end_request` of a number of requests in flight; references to others' objects."""
    for pair in _counted(model, cls, methods, paired):
        if not told_by_itself(model, pair.acquires[0].function, [half.function for half in pair.releases]):
            yield pair


def _counted(model: ClassModel, cls: Class, methods: list[Function], paired: set[Function]) -> Iterator[Pair]:
    methods = [method for method in methods if not _hands_on_within(model, method, paired)]
    up, down = Name("incr", frozenset()), Name("decr", frozenset())
    for begins, ends in reference_counts([m for m in methods if m not in paired]):
        if _returns_a_new_object(ends):
            continue  # `sign_out()` lends what `sign_in(lease)` takes back
        half = Half(begins, up, Handle.ARGUMENT, by_shape=True)
        echoes = returns_what_it_is_told(begins)
        if echoes and answers_what_lies_there(begins) and shared_key(begins, [ends]) == 0:
            half = replace(half, echo=True, by_key=True)
        elif echoes:
            half = replace(half, handle=Handle.RESULT, value=value_of(begins), echo=True)
        elif hands_out_a_key(begins, ends):
            half = replace(half, handle=Handle.RESULT, value=Value.INDEX)
        elif struck_off_by_its_answer(begins, ends):
            half = replace(half, handle=Handle.RESULT, value=value_of(begins))
        yield Pair(cls.name, cls, (half,), (Half(ends, down, half.handle),))
    told: set[Function] = set()
    for begins, ends, parameter, of_told in counts_of_objects([m for m in methods if m not in paired]):
        if LENDING.isdisjoint(begins.decorators) and _belong_together(model, begins, ends):
            told.add(begins)
            yield _counts(cls, begins, ends, parameter, of_told)
    for begins, ends in counts_of_itself([m for m in methods if m not in paired]):
        if LENDING.isdisjoint(begins.decorators) and _asked_both(model, begins, ends):
            told.add(begins)
            half = Half(begins, up, Handle.RECEIVER, by_shape=True, echo=returns_itself(begins))
            yield Pair(cls.name, cls, (half,), (Half(ends, down, Handle.RECEIVER),))
    methods = [method for method in methods if method not in told]
    for begins, ends in counts_of_what_is_returned([m for m in methods if m not in paired]):
        half = Half(begins, up, value=value_of(begins), by_shape=True, part=part_counted(begins))
        yield Pair(cls.name, cls, (half,), (Half(ends, down),))
    for begins, ends in entered_with_one([m for m in methods if m not in paired]):
        half = Half(begins, up, value=value_of(begins), by_shape=True)
        yield Pair(cls.name, cls, (half,), (Half(ends, down),))
    plain = [m for m in methods if m not in paired and LENDING.isdisjoint(m.decorators)]
    for begins, ends in (*use_counts(plain), *credits_taken(plain), *lock_pairs(plain), *gates(plain)):
        marking = marking_half(begins, up, [ends])
        if marking is not None and (returns_the_amount(begins) or returns_what_it_adds(begins, [ends])):
            marking = Half(begins, up, value=Value.AMOUNT, echo=True)
        elif marking is not None and hands_out_what_ends(begins, ends):
            marking = Half(begins, up, value=value_of(begins))
        if marking is not None:
            yield Pair(cls.name, cls, (replace(marking, by_shape=True),), (Half(ends, down, marking.handle),))
    for begins, ends in _asked_for(model, list(capacities([m for m in methods if m not in paired]))):
        marking = marking_half(begins, up, [ends])
        if marking is not None and marking.value is Value.AMOUNT:
            yield Pair(cls.name, cls, (replace(marking, by_shape=True),), (Half(ends, down, marking.handle),))
    for begins, ends in granted(plain):
        if asked_in_turn(model, begins, ends):
            half = Half(begins, up, Handle.RECEIVER, by_shape=True)
            yield Pair(cls.name, cls, (half,), (Half(ends, down, Handle.RECEIVER),))
    for begins, back in saved_marks(plain):
        half = Half(begins, up, Handle.RECEIVER, by_shape=True)
        yield Pair(cls.name, cls, (half,), tuple(Half(ends, down, Handle.RECEIVER) for ends in back))
    for begins, ends in permits([m for m in methods if m not in paired]):
        half = Half(begins, Name("reserve", frozenset()), Handle.ARGUMENT, by_shape=True)
        yield Pair(cls.name, cls, (half,), (Half(ends, down, Handle.ARGUMENT),))


def _returns_a_new_object(method: Function) -> bool:
    returned = (node.value for node in method.statements if isinstance(node, ast.Return))
    made = (value.func for value in returned if isinstance(value, ast.Call))
    return any(isinstance(func, ast.Name) and func.id.lstrip("_")[:1].isupper() for func in made)


def _asked_for(
    model: ClassModel, found: list[tuple[Function, Function]]
) -> Iterator[tuple[Function, Function]]:
    """Of these, those that are used as pairs, and `try_reserve(n)` beside a `reserve(n)` that is."""
    asked = [(begins, ends) for begins, ends in found if asked_in_turn(model, begins, ends)]
    for begins, ends in found:
        same = {first for first, last in asked if last is ends}
        if begins in same or any(_is_a_way_of(begins, each) for each in same):
            yield begins, ends


def _is_a_way_of(one: Function, other: Function) -> bool:
    """Their names say the same, but for how: whether it waits, or only tries."""
    words = set(split(one.name)) ^ set(split(other.name))
    return bool(words) and words <= WAYS_OF_ASKING


def _hands_on_within(model: ClassModel, method: Function, known: Set[Function]) -> bool:
    """`self.lock(node)`, and `return Match(node, slots)`, or `return node, depth`: a user of its own class's
    half, who owes what he has locked to his caller, and that is a field of the match."""
    names = {half.name for half in known if half.cls is method.cls}
    if not names:
        return False
    locked = {
        given.id
        for call in method.calls
        if own_attribute(call.func, method.owner or "") in names
        for given in call.args
        if isinstance(given, ast.Name)
    }
    made = (node.value for node in method.statements if isinstance(node, ast.Return) and locked)
    return any(
        any(isinstance(given, ast.Name) and given.id in locked for given in _parts(model, method, value))
        for value in made
    )


def _parts(model: ClassModel, method: Function, value: ast.expr | None) -> list[ast.expr]:
    match value:
        case ast.Tuple(elts=parts):
            return parts
        case ast.Call(func=func, args=args) if isinstance(model.callee(method, func), Class):
            return args
    return []


def _asked_both(model: ClassModel, begins: Function, ends: Function) -> bool:
    return used_together(model, begins, ends) or ended_by_who_gets_it(model, begins, ends)


def _belong_together(model: ClassModel, begins: Function, ends: Function) -> bool:
    return used_together(model, begins, ends) or used_by_its_own(begins, ends)


def counting_functions(name: str, functions: list[Function]) -> Iterator[Pair]:
    """`share(page)` raises the `page.refs` that `unshare(page)` lowers; `enter()` and `leave()` count in the
    module."""
    up, down = Name("incr", frozenset()), Name("decr", frozenset())
    for begins, ends in reference_counts(functions):
        half = Half(begins, up, Handle.ARGUMENT, by_shape=True)
        yield Pair(name, None, (half,), (Half(ends, down, Handle.ARGUMENT),))
    for begins, ends in use_counts([each for each in functions if not own_parameters(each)]):
        marking = marking_half(begins, up, [ends])
        if marking is not None:
            yield Pair(name, None, (replace(marking, by_shape=True),), (Half(ends, down, marking.handle),))


def _counts(cls: Class, begins: Function, ends: Function, parameter: str, of_told: bool) -> Pair:
    """The object itself is the lease, whether it is told of it or looks it up."""
    handle = Handle.ARGUMENT if of_told and not returns_what_it_is_told(begins) else Handle.RESULT
    echo = of_told and handle is Handle.RESULT
    half = Half(begins, Name("incr", frozenset()), handle, by_shape=True, echo=echo)
    if handle is Handle.RESULT:
        half = replace(half, part=part_counted(begins))
    position = 0 if own_parameters(ends)[0] == parameter else parameter
    return Pair(cls.name, cls, (half,), (Half(ends, Name("decr", frozenset()), handle, position),))
