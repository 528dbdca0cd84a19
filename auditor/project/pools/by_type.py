"""Pairs told by names and types: `attach(size) -> Segment | None`, and `detach(segment: Segment)`."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import ways
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.used_together import is_told_one_of_those, is_told_what_it_makes
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import changes_state, own_parameters, removes_from_state
from auditor.protocols.vocabulary import Name, split, undoes

MAKING = frozenset({"create", "make", "new", "build", "load", "register", "subscribe", "add", "spawn"})
"""First words of what makes something that may stay: nobody owes the end of each user."""


def typed_pairs(cls: Class, methods: list[Function], paired: Set[Function]) -> Iterator[Pair]:
    """Of methods that both change their object, of which the second is told what the first one makes."""
    acquiring, releasing = Name("acquire", frozenset()), Name("release", frozenset())
    for taker in methods:
        if taker in paired or taker.is_abstract or not LENDING.isdisjoint(taker.decorators):
            continue
        if not MAKING.isdisjoint(split(taker.name)[:1]):
            continue
        givers = [
            giver
            for giver in methods
            if undoes(giver.name, taker.name)
            and len(own_parameters(giver)) == 1
            and is_told_what_it_makes(taker, giver)
        ]
        if not givers or is_told_what_it_makes(taker, taker):
            continue  # `ref(entry) -> Entry` counts on what it is told
        if not (changes_state(taker) or removes_from_state(taker)):
            continue
        givers = [giver for giver in givers if changes_state(giver)]
        if givers:
            half = Half(taker, acquiring, Handle.RESULT, 0, value_of(taker), by_shape=True)
            yield Pair(cls.name, cls, (half,), tuple(Half(each, releasing) for each in givers))


def _moves_out(method: Function, ends: list[Function]) -> bool:
    """`shed(n) -> list[Page]` takes pages out of the table of those in use, and `recycle(page: Page)` puts
    one among the free: those are nobody's meanwhile. What is drained from among the free may go for good."""
    removed = {name for name, _ in (*field_work(method).taken, *field_work(method).removed)}
    filled = {put.field for end in ends for put in field_work(end).put}
    apart = bool(removed) and removed.isdisjoint(filled)
    return apart and any(is_told_one_of_those(method, end) for end in ends)


def _makes_such(method: Function, lending: Half) -> bool:
    """`return Permit(tenant)` in `try_enter`, as in `enter`."""
    made = _made_to_return(method)
    return bool(made) and made == _made_to_return(lending.function)


def _counts_down(end: Function) -> bool:
    """It says of what it is told that it has one user less: `place.pins -= 1`."""
    told = own_parameters(end)
    return any(
        isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.target, ast.Attribute)
        and getattr(node.target.value, "id", "") in told
        for node in end.statements
    )


def _counts_up(method: Function) -> bool:
    return any(isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) for node in method.statements)


def _made_to_return(method: Function) -> set[str]:
    returned = (node.value for node in method.statements if isinstance(node, ast.Return) and node.value)
    made = (way.func for value in returned for way in ways(value) if isinstance(way, ast.Call))
    return {ast.unparse(each) for each in made if last_part(each)[:1].isupper()}


def other_takers(methods: list[Function], pairs: list[Pair], paired: Set[Function]) -> Iterator[Pair]:
    """`collect() -> Slot | None` beside `open_slot() -> Slot | None` and `close_slot(slot: Slot)`: what
    others have posted lies in another store of the pool, and whoever takes it out closes it."""
    for pair in pairs:
        ends = [half.function for half in pair.releases]
        lent = [half for half in pair.acquires if half.handle is Handle.RESULT]
        typed = any(is_told_what_it_makes(half.function, end) for half in lent for end in ends)
        for method in methods if typed else ():
            if method in paired or method in ends or method.name.startswith("_") or method.is_abstract:
                continue
            if not LENDING.isdisjoint(method.decorators):
                continue
            if all(map(_counts_down, ends)) and not _counts_up(method):
                continue  # `remove(key) -> Place` beside `pin` and `unpin(place)`, which counts its users
            alike = not is_told_what_it_makes(method, method) and any(_makes_such(method, h) for h in lent)
            if not (alike or removes_from_state(method)):
                continue
            if any(is_told_what_it_makes(method, end) for end in ends) or _moves_out(method, ends):
                half = Half(method, lent[0].name, Handle.RESULT, 0, lent[0].value, by_shape=True)
                yield Pair(pair.name, pair.owner, (half,), pair.releases)
