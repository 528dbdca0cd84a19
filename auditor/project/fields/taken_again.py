"""What a method takes out of a container, and gives back or keeps on another of its ways: there it has been
acquired a second time, and is followed from there on. The loss is told of the call that put it there."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from auditor.flow.effects import Handle
from auditor.flow.lease import EXCEPTIONAL, Field, Leak, Loss, StoredField
from auditor.ir.ops import ANY_ITEM, Path
from auditor.model import Span
from auditor.project.code.modules import Function
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome

Found = Mapping[int, tuple[StoredField, ...]]


@dataclass(frozen=True, slots=True)
class Taking:
    """`call` of `method` takes out of a container, at `span`, what `outcome` put there under `path`."""

    outcome: Outcome
    method: Function
    call: ast.Call
    path: Path
    span: Span

    @property
    def source(self) -> Source:
        acquisition = self.outcome.acquisition
        inside = self.path[self.path.index(ANY_ITEM) + 1 :]
        pair = isinstance(self.call.func, ast.Attribute) and self.call.func.attr == "popitem"
        return Source(
            acquisition.protocol,
            "discovered",
            Handle.RESULT,
            acquisition.value,
            rest=("[1]", *inside) if pair else inside,
            fresh=bool(inside),
            second_hand=True,
        )


def told_how_taken(
    takings: Sequence[Taking],
    found: Found,
    outcomes: Mapping[int, Outcome],
    follow: Callable[[Function, ast.Call, Source], None],
) -> dict[int, tuple[StoredField, ...]]:
    """With the way on which each entry that is taken out is lost. Where no first acquire can tell of it, the
    call that takes it out does."""
    ways: dict[Span, tuple[Leak, Outcome]] = {}
    for taking in takings:
        if id(taking.call) not in outcomes:
            follow(taking.method, taking.call, taking.source)
        outcome = outcomes.get(id(taking.call))
        leaks = outcome.lease.leaks if outcome is not None else ()
        lost = next((leak for leak in leaks if leak.loss not in EXCEPTIONAL), None)
        if outcome is not None and lost is not None:
            ways[taking.span] = lost, outcome
    told = {drop.at for fields in found.values() for each in fields for drop in each.drops} & ways.keys()
    for _, outcome in (ways[at] for at in told):
        outcome.lease = replace(outcome.lease, leaks=(), told_elsewhere=outcome.lease.leaks)
    return {at: tuple(_with_ways(each, ways) for each in fields) for at, fields in found.items()}


def _with_ways(field: StoredField, ways: Mapping[Span, tuple[Leak, Outcome]]) -> StoredField:
    drops = (replace(drop, trace=ways[drop.at][0].trace) if drop.at in ways else drop for drop in field.drops)
    return replace(field, drops=tuple(drops))


def told_where_it_was_put(
    found: dict[int, tuple[StoredField, ...]], outcome: Outcome, acquired: Sequence[Outcome]
) -> bool:
    """Whether acquires are known that put such entries into the table which this one came out of, or what
    lies in a field of theirs; the loss is told of them then."""
    taken, cls = outcome.call.func, outcome.function.cls
    if cls is None or not isinstance(taken, ast.Attribute):
        return False
    path = f"{ast.unparse(taken.value).partition('.')[2]}[*]"
    lost = next(leak for leak in outcome.lease.leaks if leak.loss not in EXCEPTIONAL)
    drop = Leak(Loss.DROPPED, outcome.lease.span, lost.holder, lost.trace)
    for each in acquired:
        stored = StoredField(Field(cls.name, path, "self"), each.lease.span, drops=(drop,))
        found[id(each.call)] = (*found.get(id(each.call), ()), stored)
    if acquired:
        return True
    putting = [
        (at, number)
        for at, fields in sorted(found.items(), key=lambda each: [field.at for field in each[1]])
        for number, stored in enumerate(fields)
        if stored.field.owner == cls.name and stored.field.path == path and not stored.drops
    ]
    for at, number in putting:
        fields = list(found[at])
        fields[number] = replace(fields[number], drops=(drop,))
        found[at] = tuple(fields)
    return bool(putting)
