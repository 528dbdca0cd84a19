"""What a method takes out of a container, and gives back or keeps on another of its ways: there it has been
acquired a second time, and that is where a loss is told."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from auditor.flow.effects import Handle
from auditor.flow.lease import EXCEPTIONAL, StoredField
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


def told_where_taken(
    takings: Sequence[Taking],
    found: Found,
    outcomes: Mapping[int, Outcome],
    follow: Callable[[Function, ast.Call, Source], None],
) -> dict[int, tuple[StoredField, ...]]:
    """Without the entries whose loss is told of the call that takes them; where that loses nothing, the first
    acquire tells of it as before."""
    moved: set[Span] = set()
    for taking in takings:
        if id(taking.call) not in outcomes:
            follow(taking.method, taking.call, taking.source)
        outcome = outcomes.get(id(taking.call))
        if outcome is not None and any(leak.loss not in EXCEPTIONAL for leak in outcome.lease.leaks):
            moved.add(taking.span)
    return {at: tuple(_without(each, moved) for each in fields) for at, fields in found.items()}


def _without(field: StoredField, moved: set[Span]) -> StoredField:
    left = tuple(drop for drop in field.drops if drop.at not in moved)
    return replace(field, drops=left, escapes=field.escapes or len(left) < len(field.drops))
