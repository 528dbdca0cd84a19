"""Pairs of a class that count: users, permits, references to others' objects."""

from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import hands_out_what_ends
from auditor.project.pools.halves import LENDING, Half, Pair, marking_half
from auditor.project.pools.lent_kinds import value_of
from auditor.project.shapes.reference_counts import (
    counts_of_what_is_returned,
    reference_counts,
    returns_what_it_is_told,
)
from auditor.project.shapes.use_counts import permits, use_counts
from auditor.protocols.vocabulary import Name


def counted_pairs(cls: Class, methods: list[Function], paired: set[Function]) -> Iterator[Pair]:
    """`begin_request` and `end_request` of a number of requests in flight; references to others' objects."""
    up, down = Name("incr", frozenset()), Name("decr", frozenset())
    for begins, ends in reference_counts([m for m in methods if m not in paired]):
        half = Half(begins, up, Handle.ARGUMENT, by_shape=True)
        if returns_what_it_is_told(begins):
            half = replace(half, handle=Handle.RESULT, value=value_of(begins), echo=True)
        yield Pair(cls.name, cls, (half,), (Half(ends, down, half.handle),))
    for begins, ends in counts_of_what_is_returned([m for m in methods if m not in paired]):
        half = Half(begins, up, value=value_of(begins), by_shape=True)
        yield Pair(cls.name, cls, (half,), (Half(ends, down),))
    for begins, ends in use_counts(
        [m for m in methods if m not in paired and LENDING.isdisjoint(m.decorators)]
    ):
        marking = marking_half(begins, up, [ends])
        if marking is not None and hands_out_what_ends(begins, ends):
            marking = Half(begins, up, value=value_of(begins))
        if marking is not None:
            yield Pair(cls.name, cls, (replace(marking, by_shape=True),), (Half(ends, down, marking.handle),))
    for begins, ends in permits([m for m in methods if m not in paired]):
        half = Half(begins, Name("reserve", frozenset()), Handle.ARGUMENT, by_shape=True)
        yield Pair(cls.name, cls, (half,), (Half(ends, down, Handle.ARGUMENT),))
