"""Pairs told by names and types: `attach(size) -> Segment | None`, and `detach(segment: Segment)`."""

from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.used_together import is_told_what_it_makes
from auditor.project.shapes.pool_state import changes_state, own_parameters
from auditor.protocols.vocabulary import Name, split, undoes

MAKING = frozenset({"create", "make", "new", "build", "load", "register", "subscribe", "add", "spawn"})
"""First words of what makes something that may stay: nobody owes the end of each user."""


def typed_pairs(cls: Class, methods: list[Function], paired: Set[Function]) -> Iterator[Pair]:
    """Of methods that both change their object, of which the second is told what the first one makes."""
    acquiring, releasing = Name("acquire", frozenset()), Name("release", frozenset())
    for taker in methods:
        if taker in paired or taker.is_abstract or not LENDING.isdisjoint(taker.decorators):
            continue
        if is_told_what_it_makes(taker, taker):
            continue  # `ref(entry) -> Entry` counts on what it is told
        if not MAKING.isdisjoint(split(taker.name)[:1]) or not changes_state(taker):
            continue
        givers = [
            giver
            for giver in methods
            if undoes(giver.name, taker.name)
            and len(own_parameters(giver)) == 1
            and is_told_what_it_makes(taker, giver)
            and changes_state(giver)
        ]
        if givers:
            half = Half(taker, acquiring, Handle.RESULT, 0, value_of(taker), by_shape=True)
            yield Pair(cls.name, cls, (half,), tuple(Half(each, releasing) for each in givers))
