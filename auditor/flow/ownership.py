"""The ownership domain: where one lease is held, and what each operation does to that.

A lease is followed alone, from its acquire on; other leases of the function are only calls. Its state is
the set of places that hold it. It ends released, handed over, unknown, or lost: no place is left, or the
function is left while only locals hold it."""

import ast
from dataclasses import dataclass, field, replace

from auditor.flow.effects import BORROWED, Acquisition, Effects, Fate, Handle, Position, Treatment, Value
from auditor.flow.knowledge import FILLING
from auditor.flow.lease import Loss
from auditor.flow.limits import TooManyStates
from auditor.flow.places import begins_with, below, escaped, named, part
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    RESULT,
    Assume,
    Await,
    Call,
    Capture,
    Constant,
    Delete,
    Edge,
    EndStatement,
    Enter,
    Fresh,
    InPlace,
    Leave,
    Lookup,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    Way,
    Yield,
    is_temporary,
)

Places = frozenset[Path]
NOWHERE: Places = frozenset()
PATH_LENGTH = 6
PLACES_PER_STATE = 24
PROCESS_POSITION = "<process>"
"""Stands for the operand of calls that end what the whole process holds."""


@dataclass(frozen=True, slots=True)
class Held:
    """One lease as it is held. `maybe` are places that may hold it too; `seen` are loops that looked at it.

    `lent` after a yield of it; `stale` once its own acquire has run again; `kept` once more than an
    intermediate value held it; `noted` are lists that are not empty then: the loop that it was
    acquired in goes over them, or something was written down in them since."""

    places: Places
    maybe: Places = NOWHERE
    seen: frozenset[int] = frozenset()
    lent: bool = False
    stale: bool = False
    kept: bool = False
    noted: frozenset[Path] = frozenset()


@dataclass(slots=True)
class Endings:
    """What happened to the lease over all paths, with the states from which it did."""

    lost: list[tuple[Loss, int, Held]] = field(default_factory=list)
    released: dict[int, Held] = field(default_factory=dict)
    returned: dict[int, Path] = field(default_factory=dict)
    stored: dict[int, Path] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)

    @property
    def handed_over(self) -> bool:
        return bool(self.returned or self.stored or self.taken)


class Ownership:
    """The step function of one lease in one function."""

    def __init__(
        self, graph: Graph, effects: Effects, acquisition: Acquisition, site: int, lends: bool
    ) -> None:
        self.graph = graph
        self.effects = effects
        self.acquisition = acquisition
        self.site = site
        self.lends = lends  # a context manager's yield gives nothing away
        self.parameters = frozenset(graph.parameters)
        self.endings = Endings()

    def step(self, node: int, held: Held, edge: Edge) -> tuple[Held, ...]:
        """The states after `node` along `edge`; endings are noted on the way."""
        op = self.graph.ops[node]
        if isinstance(op, Call):
            return tuple(_limited(after) for after in self._call(node, op, held, edge))
        after = self._after(node, op, held, edge)
        return (_limited(after),) if after is not None else ()

    def _after(self, node: int, op: Op, held: Held, edge: Edge) -> Held | None:
        match op:
            case Assume():
                return self._assume(node, op, held)
            case Move() | Await():
                return self._move(node, op, held, edge)
            case EndStatement():
                return self._end_statement(node, op, held)
            case Store():
                return self._store(node, op, held)
            case Next():
                return self._next(node, op, held, edge)
            case Leave():
                self._leave(node, op, held)
                return None
            case Make(target=target, items=items):
                gained = [self._copied(held, (*target, component), source) for component, source in items]
                return self._rebind(node, held, target, gained)
            case Unpack():
                return self._unpack(node, op, held)
            case Constant(target=target):
                return self._rebind(node, held, target, [])
            case Fresh(target=target, uses=uses):
                return self._fresh(node, held, target, uses)
            case Lookup(target=target, index=index):
                return self._looked_up(held, target, index)
            case InPlace():
                return self._in_place(node, op, held)
            case Delete():
                return self._delete(node, op, held)
            case Capture():
                return self._capture(node, op, held)
            case Yield():
                return self._yield(node, op, held, edge)
            case Enter(context=context):
                if self._inside(held, context) is not None:
                    self.endings.released.setdefault(node, held)
                    return None
        return held

    # Where the lease is -------------------------------------------------------------------------------------

    def _inside(self, held: Held, operand: Path) -> Path | None:
        """Where in the operand the lease is, over all its places."""
        for place in sorted(held.places):
            rest = below(place, operand)
            if rest is not None:
                return rest
            if part(place, operand, self.acquisition.value) == "same":
                return ()
        return None

    def _copied(self, held: Held, target: Path, source: Path) -> tuple[Places, Places]:
        """Places, and maybe-places, that `target = source` adds."""
        sure: set[Path] = set()
        maybe: set[Path] = set()
        for place in held.places:
            rest = below(place, source)
            if rest is not None:
                sure.add(target + rest)
                continue
            piece = part(place, source, self.acquisition.value)
            if piece is not None:
                (sure if piece == "same" else maybe).add(target)
        for place in held.maybe:
            rest = below(place, source)
            if rest is not None:
                maybe.add(target + rest)
        return frozenset(sure), frozenset(maybe)

    def _rebind(
        self,
        node: int,
        held: Held,
        target: Path,
        gained: list[tuple[Places, Places]],
        loss: Loss = Loss.REBOUND,
    ) -> Held | None:
        """`target` now names something else, or what `gained` says."""
        if self.acquisition.keyed and target == (self._key_root(),):
            self.endings.unknown.add(node)
            return None
        if target in held.noted:
            held = replace(held, noted=held.noted - {target})
        kept = frozenset(place for place in held.places if not _overwrites(target, place))
        outside = [place for place in sorted(held.places - kept) if self._outlives(place)]
        if outside and len(target) == 1:
            self.endings.stored.setdefault(node, outside[0])  # the name moves on, the object keeps it
            return None
        maybe = frozenset(place for place in held.maybe if not _overwrites(target, place))
        for sure, perhaps in gained:
            kept |= sure
            maybe |= perhaps
        if kept == held.places and maybe == held.maybe:
            return held
        return self._keep(node, held, replace(held, places=kept, maybe=maybe - kept), loss)

    def _outlives(self, place: Path) -> bool:
        return escaped(place, self.parameters, self.graph.fresh_roots)

    def _key_root(self) -> str:
        return self.acquisition.places[0][0]

    def _keep(self, node: int, before: Held, after: Held, loss: Loss) -> Held | None:
        """Unless nothing holds the lease any more."""
        if after.places:
            return after if after.kept or not named(after.places) else replace(after, kept=True)
        if before.lent:
            self.endings.taken.add(node)
        elif after.maybe:
            self.endings.unknown.add(node)
        else:
            again = before.stale or self.acquisition.handle is not Handle.RESULT
            self._lose(Loss.NEXT_TURN if again and loss is Loss.REBOUND else loss, node, before)
        return None

    def _lose(self, loss: Loss, node: int, held: Held) -> None:
        entry = (loss, node, held)
        if entry not in self.endings.lost:
            self.endings.lost.append(entry)

    # Operations ---------------------------------------------------------------------------------------------

    def _assume(self, node: int, op: Assume, held: Held) -> Held | None:
        """A held lease is neither None nor false, and a container of it is not empty; it is itself and
        nothing else."""
        if op.kind == "same":
            return held if self._identical(op, held) in (op.value, None) else None
        if op.subject is None or (op.kind != "truth") != op.value or self.acquisition.keyed:
            return held
        if any(begins_with(place, op.subject) for place in held.places):
            return None
        if any(begins_with(place, op.subject) and len(place) > len(op.subject) for place in held.maybe):
            self.endings.unknown.add(node)
            return None
        return held

    def _identical(self, op: Assume, held: Held) -> bool | None:
        """Whether `subject is other`, as far as one of them is the lease."""
        if op.subject is None or op.other is None or self.acquisition.keyed:
            return None
        holding = (op.subject in held.places, op.other in held.places)
        if not any(holding) or {op.subject, op.other} & held.maybe:
            return None
        return all(holding)

    def _move(self, node: int, op: Move | Await, held: Held, edge: Edge) -> Held | None:
        if edge in RAISING and self._just_acquired(op, held):
            return None  # the awaited acquire itself failed: nothing was acquired
        if edge in RAISING or op.target == op.source:
            return held
        return self._rebind(node, held, op.target, [self._copied(held, op.target, op.source)])

    def _just_acquired(self, op: Move | Await, held: Held) -> bool:
        site = self.graph.ops[self.site] if self.site >= 0 else None
        if isinstance(site, Call) and op.source == site.target:
            return True
        return all(is_temporary(place) for place in held.places)

    def _unpack(self, node: int, op: Unpack, held: Held) -> Held | None:
        gained = []
        for component, target in op.targets:
            gained.append(self._copied(held, target, (*op.source, component)))
        for _, target in op.targets:
            after = frozenset(place for place in held.places if not _overwrites(target, place))
            held = replace(held, places=after)
        places = held.places.union(*(sure for sure, _ in gained))
        maybe = held.maybe.union(*(perhaps for _, perhaps in gained))
        return self._keep(node, held, replace(held, places=places, maybe=maybe - places), Loss.REBOUND)

    def _fresh(self, node: int, held: Held, target: Path, uses: tuple[Path, ...]) -> Held | None:
        told = self.acquisition.value is not Value.TENSOR and any(self._about(held, use) for use in uses)
        return self._rebind(node, held, target, [(NOWHERE, frozenset({target}) if told else NOWHERE)])

    def _looked_up(self, held: Held, target: Path, index: Path) -> Held:
        """`table[number]` says as much as the number does."""
        if self.acquisition.value is not Value.INDEX or not self._about(held, index):
            return held
        return replace(held, maybe=held.maybe | ({target} - held.places))

    def _about(self, held: Held, operand: Path) -> bool:
        """Whether the operand is the lease, holds it, or was computed from it."""
        return self._inside(held, operand) is not None or any(
            below(place, operand) is not None for place in held.maybe
        )

    def _next(self, node: int, op: Next, held: Held, edge: Edge) -> Held | None:
        if edge in RAISING:
            return held
        inside = [place for place in held.places if begins_with(place, op.source)]
        if edge is Edge.EXHAUSTED:
            counting = (op.counted or self.acquisition.value is Value.INDEX) and (
                self.acquisition.value is not Value.TENSOR
                or any(piece.startswith("[") for place in held.places for piece in place)
            )
            if (inside or counting or op.source in held.noted) and node not in held.seen:
                return None  # the container is not empty while it holds the lease, nor is a count over it
            return replace(held, seen=held.seen - {node})
        element = (*op.source, "[*]")
        after = self._rebind(node, held, op.target, [self._copied(held, op.target, element)])
        return replace(after, seen=after.seen | {node}) if after is not None else after

    def _store(self, node: int, op: Store, held: Held) -> Held | None:
        value = self.acquisition.value
        if op.sliced and value is Value.TENSOR:
            return held
        target = (*op.target[:-1], "[*]") if op.target[-1] == "[:]" else op.target
        sure, maybe = self._copied(held, target, op.source)
        if op.sliced and value is Value.INDEX and sure:
            sure = frozenset({target})
        return self._put(node, held, target, sure, maybe)

    def _put(self, node: int, held: Held, target: Path, sure: Places, maybe: Places) -> Held | None:
        """The lease is (perhaps) stored at `target`."""
        gone = frozenset(
            place
            for place in held.places
            if len(target) > 1 and "[*]" not in target and begins_with(place, target) and place not in sure
        )
        if sure and self.acquisition.keyed:
            self.endings.unknown.add(node)  # others can reach the object now
            return None
        if sure or maybe:
            if self._outlives(target):
                return self._escape(node, held, target, sure)
            after = replace(held, places=held.places | sure, maybe=held.maybe | (maybe - sure))
            return self._keep(node, held, after, Loss.OVERWRITTEN)
        if gone:
            return self._keep(node, held, replace(held, places=held.places - gone), Loss.OVERWRITTEN)
        return held

    def _escape(self, node: int, held: Held, target: Path, sure: Places) -> Held | None:
        if not sure:
            if any(self._outlives(place) for place in held.places):
                return held  # something that may be the same is kept elsewhere; its owner is known
            self.endings.unknown.add(node)
            return None
        if target[0] in self.parameters or target[0][0] == "@":
            return replace(
                held, places=held.places | sure, kept=True
            )  # the same function may still give it back
        self.endings.stored.setdefault(node, min(sure))
        return None

    def _in_place(self, node: int, op: InPlace, held: Held) -> Held | None:
        if self.acquisition.value is Value.TENSOR and not any(len(p) > len(op.operand) for p in held.places):
            return held
        sure, maybe = self._copied(held, (*op.target, "[*]"), (*op.operand, "[*]"))
        if not sure and not maybe:
            return held
        if self._outlives((*op.target, "[*]")):
            return self._escape(node, held, op.target, sure)
        return replace(held, places=held.places | sure, maybe=held.maybe | maybe)

    def _delete(self, node: int, op: Delete, held: Held) -> Held | None:
        loss = Loss.DELETED if len(op.target) == 1 else Loss.DROPPED
        gone = frozenset(place for place in held.places if begins_with(place, op.target))
        if not gone:
            return held
        return self._keep(node, held, replace(held, places=held.places - gone), loss)

    def _capture(self, node: int, op: Capture, held: Held) -> Held | None:
        """A closure that gives the lease back holds it too."""
        added: set[Path] = set()
        for name in op.names:
            for place in held.places:
                if place[0] != name:
                    continue
                fate = self.effects.captured(
                    op.function, name, place[1:], self.acquisition.value, self.acquisition.protocol
                )
                if fate in (Fate.RELEASE, Fate.TAKE):
                    added.add((*op.target, f"<{name}>", *place[1:]))
        kept = frozenset(place for place in held.places if not _overwrites(op.target, place))
        return replace(held, places=kept | added) if added else held

    def _yield(self, node: int, op: Yield, held: Held, edge: Edge) -> Held | None:
        if self.lends:
            unnamed = (
                op.source is not None and not named(held.places) and self._inside(held, op.source) is not None
            )
            return replace(held, lent=True) if unnamed else held
        if op.source is not None and self._inside(held, op.source) is not None:
            held = replace(held, lent=True)
        return None if edge in RAISING and held.lent else held

    def _end_statement(self, node: int, op: EndStatement, held: Held) -> Held | None:
        if not any(is_temporary(place) for place in held.places | held.maybe):
            return held
        places = frozenset(place for place in held.places if not is_temporary(place))
        maybe = frozenset(place for place in held.maybe if not is_temporary(place))
        loss = (
            Loss.DISCARDED if not held.kept else Loss.DROPPED if isinstance(op.at, ast.Expr) else Loss.REBOUND
        )
        return self._keep(node, held, replace(held, places=places, maybe=maybe), loss)

    def _leave(self, node: int, op: Leave, held: Held) -> None:
        """The function is left: by whom is the lease held now?"""
        endings = self.endings
        outside = [] if self.acquisition.keyed else [p for p in sorted(held.places) if self._outlives(p)]
        elsewhere = [place for place in outside if place not in self.acquisition.places]
        fields = [
            place for place in elsewhere or outside if not any(piece.startswith("[") for piece in place)
        ]
        fields.sort(key=lambda place: (any("<" in piece for piece in place), len(place)))
        kept = next(iter(fields), None)
        lent_out = any(place in self.acquisition.places and self._outlives(place) for place in held.places)
        tabled = self.acquisition.value is Value.INDEX and bool(
            elsewhere
        )  # written down, a number has been handed over
        if (
            op.way is Way.RETURN
            and kept is None
            and not lent_out
            and not tabled
            and self._returned(node, held)
        ):
            return
        if held.lent:
            endings.taken.add(node)
        elif outside:
            if op.way is not Way.RAISE:
                endings.stored.setdefault(node, kept or (elsewhere or outside)[0])
        else:
            losses = {Way.RETURN: Loss.RETURN, Way.FALL_THROUGH: Loss.FALL_THROUGH, Way.RAISE: Loss.RAISE}
            self._lose(losses[op.way], node, held)

    def _returned(self, node: int, held: Held) -> bool:
        """A lease that also lies in a table is the table's to count and the caller's to release."""
        for place in sorted(held.places):
            if place[0] == RESULT[0]:
                self.endings.returned.setdefault(node, place[1:])
                return True
        if any(place[0] == RESULT[0] for place in held.maybe):
            self.endings.unknown.add(node)
            return True
        return False

    # Calls --------------------------------------------------------------------------------------------------

    def _call(self, node: int, call: Call, held: Held, edge: Edge) -> tuple[Held, ...]:
        if edge in RAISING and self.effects.only_releases(call):
            self._pass(node, call, held, edge)
            return ()
        if node == self.site and not held.stale:
            held = replace(held, stale=True)
        if call.method in FILLING and call.receiver is not None and self._one_of_many(held):
            held = replace(held, noted=held.noted | {call.receiver})
        fresh = self._rebind(
            node, held, call.target, [], Loss.NEXT_TURN
        )  # left from an earlier turn of a loop
        return self._pass(node, call, fresh, edge) if fresh is not None else ()

    def _one_of_many(self, held: Held) -> bool:
        return self.acquisition.keyed or any(ANY_ITEM in place for place in held.places)

    def _pass(self, node: int, call: Call, held: Held, edge: Edge) -> tuple[Held, ...]:
        """The call is given the lease, or is not."""
        after = held
        split = False
        for position, operand in self._operands(call):
            if self._perhaps_ended(call, position, operand, held):
                self.endings.unknown.add(node)
                return ()
            for place in sorted(held.places):
                treatment = self._treatment(call, position, operand, place)
                if treatment is None or treatment == BORROWED:
                    continue
                split = split or treatment.split
                passed = self._treated(node, call, after, edge, place, treatment)
                if passed is None:
                    return (held,) if treatment.split else ()
                after = passed
        if after == held:
            return (held,)
        kept = self._keep(node, held, after, Loss.DROPPED)
        if kept is None:
            return ()
        return (kept, held) if split else (kept,)

    def _operands(self, call: Call) -> list[tuple[Position, Path]]:
        given = operands(call)
        if self.acquisition.handle is Handle.NONE:
            given.append((PROCESS_POSITION, self.acquisition.places[0]))
        return given

    def _treated(
        self, node: int, call: Call, held: Held, edge: Edge, place: Path, treatment: Treatment
    ) -> Held | None:
        if treatment.fate is not Fate.BORROW:
            return self._ended(node, held, edge, treatment.fate)
        if edge in RAISING:
            return held
        places, maybe = held.places, held.maybe
        if treatment.result is not None:
            result = call.target + treatment.result
            if treatment.maybe and not treatment.split:
                maybe |= {result}
            else:
                places |= {result}
        if treatment.moved_to is not None and self.acquisition.keyed:
            self.endings.unknown.add(node)
            return None
        if treatment.moved_to is not None:
            if self._outlives(treatment.moved_to):
                return self._escape(node, held, treatment.moved_to, frozenset({treatment.moved_to}))
            places |= {treatment.moved_to}
        if treatment.leaves:
            places -= {place}
        return replace(held, places=places, maybe=maybe - places)

    def _treatment(self, call: Call, position: Position, operand: Path, place: Path) -> Treatment | None:
        acquisition = self.acquisition
        rest = below(place, operand)
        if rest is not None:
            return self.effects.treatment(call, position, rest, acquisition.value, acquisition.protocol)
        piece = part(place, operand, acquisition.value)
        if piece is None or (piece == "maybe" and acquisition.keyed):
            return None  # a pin or a lock is not undone through what the object holds
        treatment = self.effects.treatment(call, position, (), acquisition.value, acquisition.protocol)
        if piece == "same" or treatment.fate is Fate.RELEASE:
            return treatment
        if treatment.fate is Fate.BORROW and treatment.moved_to is None:
            return Treatment(result=(), maybe=True) if treatment.result is not None else None
        return Treatment(Fate.UNKNOWN)

    def _perhaps_ended(self, call: Call, position: Position, operand: Path, held: Held) -> bool:
        """Whether something that may be the lease, and that has no other owner, is released or given away
        here."""
        if any(self._outlives(place) for place in held.places):
            return False
        for place in held.maybe:
            rest = below(place, operand)
            if rest is None:
                continue
            value, protocol = self.acquisition.value, self.acquisition.protocol
            treatment = self.effects.treatment(call, position, rest, value, protocol)
            if (
                treatment.fate is not Fate.BORROW
                or treatment.moved_to is not None
                or treatment.result is not None
            ):
                return True
        return False

    def _ended(self, node: int, held: Held, edge: Edge, fate: Fate) -> Held | None:
        """Released and taken count on the raising edge too: who was given it answers for it."""
        if fate is Fate.RELEASE:
            self.endings.released.setdefault(node, held)
        elif fate is Fate.TAKE:
            self.endings.taken.add(node)
        elif edge in RAISING or any(self._outlives(place) for place in held.places):
            return held  # whoever was lent it, the object that holds it still answers for it
        else:
            self.endings.unknown.add(node)
        return None


def operands(call: Call) -> list[tuple[Position, Path]]:
    """Everything a call is given, with its position; starred operands stand for their elements."""
    given: list[tuple[Position, Path]] = []
    if call.receiver is not None:
        given.append((-1, call.receiver))
    elif call.callee is not None:
        given.append((-1, call.callee))
    for index, (path, starred) in enumerate(call.args):
        given.append((index, (*path, "[*]") if starred else path))
    for name, path in call.kwargs:
        given.append((name, path) if name is not None else (len(given), (*path, "[*]")))
    return given


def _limited(held: Held) -> Held:
    """Keeps states finite where a container is put into itself again and again. Raises TooManyStates."""
    if len(held.places) + len(held.maybe) > PLACES_PER_STATE:
        raise TooManyStates
    if all(len(place) <= PATH_LENGTH for place in held.places | held.maybe):
        return held
    shortened = [frozenset(place[:PATH_LENGTH] for place in places) for places in (held.places, held.maybe)]
    return replace(held, places=shortened[0], maybe=shortened[1] - shortened[0])


def _overwrites(target: Path, place: Path) -> bool:
    return place[: len(target)] == target


__all__ = ["Endings", "Held", "Ownership", "named", "operands"]
