"""Functions that return a lease which they got: whoever calls one acquires."""

import ast
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.flow.indirect import OVER
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.candidates import ITERATORS
from auditor.project.code.modules import Function
from auditor.project.fields.own_records import sees_to_its_records, strikes_off_its_records
from auditor.project.leases.made_for_caller import made_for_caller, shows_the_same
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome

SPECIAL = frozenset({"__call__", *ITERATORS})
"""Methods with names of the language that people call, if not by these names."""


def wraps(recogniser: Recogniser, function: Function, source: Source, outcome: Outcome) -> Source | None:
    """What its callers get; None where they owe nothing."""
    special = function.name.startswith(("<", "__")) and function.name not in SPECIAL
    known = function in recogniser.acquiring or shows_the_same(function)
    if source.handle is Handle.NONE or special or known:
        return None
    assert outcome.returned is not None
    if getattr(getattr(function.node, "returns", None), "id", "") == "bool":
        return None  # `return self.acquire_lock(key)`, which says whether it has: the key is its callers'
    if OVER in outcome.returned:
        return None  # `return csv.reader(open(path))`: its callers have the reader, and no way to the file
    if outcome.recorded and (source.opened or sees_to_its_records(recogniser, outcome)):
        return None  # `self.files[rank] = ShardFile(rank)`, `return self.files[rank]`: it keeps them
    return Source(
        source.protocol,
        source.origin,
        Handle.RESULT,
        source.value,
        0,
        outcome.returned,
        too=tuple(sorted(outcome.returned_too)),
        flags=outcome.flags,
        own=outcome.own,
        unless=outcome.unless,
        asked=outcome.asked,
        recorded=outcome.recorded,
        opened=source.opened,
        second_hand=source.second_hand or lists_what_it_counts(outcome),
        proposed=source.proposed,
        from_zero=outcome.acquisition.from_zero,
        by_key=source.by_key,
        told=_told_key(function, source, outcome),
        fresh=lists_what_it_counts(outcome)
        or (not outcome.stored and strikes_off_its_records(recogniser, outcome))
        or (
            not (outcome.stored or outcome.beside)
            and (
                _out_of_a_queue(source, outcome)
                or _of_what_was_found(source, outcome)
                or made_for_caller(recogniser, function, outcome.returned)
            )
        ),
    )


def _told_key(function: Function, source: Source, outcome: Outcome) -> str:
    """`slot = self.cache.pin(key)` and `return slot`, of a key that the caller told: he may unpin that."""
    if not source.by_key:
        return ""
    own = [place[0] for place in outcome.acquisition.places if len(place) == 1]
    own += [arg.id for arg in outcome.call.args[:1] if isinstance(arg, ast.Name)]
    return next((name for name in own if name in function.parameters), "")


def _out_of_a_queue(source: Source, outcome: Outcome) -> bool:
    """`return self.inbox.get()`: whoever gets the request that the lease lies in has it alone."""
    return source.second_hand and source.fresh and outcome.returned == source.rest


def _of_what_was_found(source: Source, outcome: Outcome) -> bool:
    """`if replica.permits.try_enter(): return replica`: others know the replica, not the permit."""
    inside = outcome.returned or ()
    return source.handle is Handle.RECEIVER and len(inside) == 1 and inside[0].startswith(".")


def lists_what_it_counts(outcome: Outcome) -> bool:
    """`block.inc_ref(); found.append(block)`, and `return found`; also of `shard.gate.enter()`."""
    return outcome.acquisition.keyed and (outcome.returned or ())[:1] == (ANY_ITEM,)


def in_other_cases(made: Source, first: Source) -> Source:
    """`if not patient: return self.near.take()`, and `return self.far.take()` below: of other callers."""
    if made.asked or len(first.asked) != 1 or first.also or made.protocol == first.protocol:
        return made
    return replace(made, asked=frozenset((key, not truth) for key, truth in first.asked))


def told_otherwise(made: Source, first: Source) -> bool:
    """`return found, False` on one way and `return created, True` on another: what comes beside it tells its
    callers which of the two they have, and either way they owe it. So does what they say themselves: `if
    patient: return pool.wait_for(n)`, and `return pool.request(n)`."""
    sources = (first, *first.also)
    same_place = all(made.rest == other.rest for other in sources)
    return same_place and all(
        any((key, not truth) in other.flags for key, truth in made.flags)
        or any((key, not truth) in other.asked for key, truth in made.asked)
        for other in sources
    )
