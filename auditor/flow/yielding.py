"""Generators: a lease that is yielded, and those of a generator that others have not asked for yet.

What a generator yields and does not see to afterwards is its consumer's. To him the lease lies in the
generator, under `TO_COME`, from the call on; it is owed once a loop or `next()` has taken it out."""

import ast
from collections.abc import Iterable
from dataclasses import replace

from auditor.flow.held import Held, limited
from auditor.flow.parted import Parted
from auditor.flow.places import named
from auditor.ir.ops import RAISING, TO_COME, Edge, Path, Yield


class Yielding(Parted):
    """The lease as what is yielded."""

    def _begun(self, before: Held, after: Iterable[Held]) -> tuple[Held, ...]:
        """What the generator has handed out is not in it; another one may be the next."""
        if not self.by_generator:
            return tuple(map(limited, after))
        states = []
        for each in after:
            states.append(limited(_handed_out(each)))
            if before.to_come and not states[-1].to_come:
                states.append(replace(before, seen=each.seen))
        return tuple(states)

    def _yield(self, node: int, op: Yield, held: Held, edge: Edge) -> Held | None:
        inside = self._inside(held, op.source) if op.source is not None else None
        if self.lends:
            return replace(held, lent=True) if inside is not None and not named(held.places) else held
        if inside is not None:
            self._note_yielded(node, op, held, inside)
            held = replace(held, lent=True)
        return None if edge in RAISING and held.lent else held

    def _note_yielded(self, node: int, op: Yield, held: Held, inside: Path) -> None:
        """Unless others can reach it as well: to them it may be theirs to end."""
        if self.acquisition.keyed or any(map(self._outlives, held.places)):
            return
        each = inside[1:] if isinstance(op.at, ast.YieldFrom) else inside
        self.endings.yielded.setdefault(node, (TO_COME, *each))


def _handed_out(held: Held) -> Held:
    places = frozenset(place for place in held.places if TO_COME not in place)
    return replace(held, places=places) if places and places != held.places else held
