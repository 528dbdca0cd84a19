"""The ownership domain: where one lease is held, and what each operation does to that.

A lease is followed alone, from its acquire on; other leases of the function are only calls. Its state is
the set of places that hold it. It ends released, handed over, unknown, or lost: no place is left, or the
function is left while only locals hold it. State: `held`; places: `holding`; calls: `passing`; conditions:
`assuming`; parts of lists: `parted`; generators: `yielding`."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from auditor.flow.as_many import as_many
from auditor.flow.by_identity import told_by_identity
from auditor.flow.counted_and_returned import goes_with_the_result
from auditor.flow.effects import Fate, Handle, Value
from auditor.flow.emptied_slots import emptied_slots
from auditor.flow.held import NOWHERE, Held, Places
from auditor.flow.indirect import AT, ON_EXIT, WITHIN, piece_of, tells_nothing, without_contents
from auditor.flow.lease import Loss
from auditor.flow.marks import begins_behind
from auditor.flow.operands import operands
from auditor.flow.own_keys import stored_under_its_own_key
from auditor.flow.places import (
    MEMORY,
    begins_exactly,
    begins_with,
    below,
    fields_beside,
    joined,
    reads,
    together,
)
from auditor.flow.plain_answers import answers_plainly, is_measured, names_of
from auditor.flow.seen_to_beside import (
    assigned_in,
    holds_no_number,
    is_an_answer,
    is_another_thing,
    is_seen_to_beside,
)
from auditor.flow.shared_keys import stored_under_shared_keys
from auditor.flow.unconcerned import roots_of, spoken_of
from auditor.flow.yielding import Yielding
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
    Exit,
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


class Ownership(Yielding):
    """The step function of one lease in one function."""

    def step(self, node: int, held: Held, edge: Edge) -> tuple[Held, ...]:
        """The states after `node` along `edge`; endings are noted on the way."""
        if self._is_unconcerned(node, held, edge):
            return (held,)
        op = self.graph.ops[node]
        if self.others:
            maybe = frozenset(place for place in held.maybe if place[0] not in self.others)
            held = replace(held, maybe=maybe) if maybe != held.maybe else held
        if held.parted and self._gone_by(op, held, edge):
            return ()
        others = self._others(node, op, held, edge)
        if isinstance(op, Call):
            held = self._told_again(op, held)
            passed = (*self._call(node, op, held, edge), *self._taken_out(op, held, edge), *others)
            return self._begun(held, passed)
        if isinstance(op, Unpack) and (apart := self._apart(op, held)):
            return self._begun(held, apart)
        after = self._after(node, op, held, edge)
        return self._begun(held, [each for each in (after, *others) if each is not None])

    def _is_unconcerned(self, node: int, held: Held, edge: Edge) -> bool:
        """Whether the operation goes by without a word about the lease."""
        spoken = self._spoken_of[node]
        if spoken is None or edge in RAISING or held.parted or self.by_generator or self.others:
            return False
        if (roots := self._roots.get(held)) is None:
            roots = self._roots[held] = roots_of(held, self.acquisition.places)
        return spoken.isdisjoint(roots)

    @cached_property
    def _spoken_of(self) -> list[frozenset[str] | None]:
        return spoken_of(self.graph)

    @cached_property
    def _roots(self) -> dict[Held, frozenset[str]]:
        return {}

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
                return self._rebind(node, held, target, [self._same_amount(op, held)])
            case Fresh():
                return self._fresh(node, op, held)
            case Lookup(target=target, index=index):
                return self._looked_up(held, target, index)
            case InPlace():
                return self._summed(op, held) or self._in_place(node, op, held)
            case Delete():
                return self._delete(node, op, held)
            case Capture():
                return self._capture(node, op, held)
            case Yield():
                return self._yield(node, op, held, edge)
            case Exit(context=context):
                again = self.acquisition.handle is Handle.RECEIVER and context in self.acquisition.places
                if again or self._on_exit(context, held):
                    self.endings.released.setdefault(node, held)
                    return None  # taken again inside `with lock:`, whose end releases it
            case Enter(context=context, at=at):
                if self._ended_behind(held, context, at):
                    self.endings.released.setdefault(node, held)
                    return None
        return held

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
        kept = held.places
        for _, target in op.targets:
            kept = frozenset(place for place in kept if not begins_exactly(target, place))
        places = kept.union(*(sure for sure, _ in gained))
        maybe = held.maybe.union(*(perhaps for _, perhaps in gained))
        return self._keep(node, held, replace(held, places=places, maybe=maybe - places), Loss.REBOUND)

    def _fresh(self, node: int, op: Fresh, held: Held) -> Held | None:
        if (same := self._same_amount(op, held)) != (NOWHERE, NOWHERE):
            return self._rebind(node, held, op.target, [same])
        if within := joined(op, held.places):
            return self._rebind(node, held, op.target, [(within, NOWHERE)])
        piece = self._piece(op, held)
        told = self.acquisition.value is Value.INDEX or (self.acquisition.value is Value.OBJECT and not piece)
        known = replace(held, maybe=without_contents(held.maybe))  # a sum of what lies there is no number
        told = told and not tells_nothing(op.at) and not is_measured(op)
        rows = self._rows_of_numbers(held)
        told = told and any(self._about(known, use) for use in op.uses if use not in rows)
        made = (*op.target, piece) if piece else op.target
        return self._rebind(node, held, op.target, [(NOWHERE, frozenset({made}) if told else NOWHERE)])

    def _piece(self, op: Fresh, held: Held) -> str | None:
        """Of a text around a path within a directory it is said once that it lies in there."""
        piece = piece_of(op.at, lambda path: self._about(held, path))
        ends = {place[-1] for place in held.maybe for use in op.uses if below(place, use) is not None}
        around = ends == {WITHIN} and not any(self._inside(held, use) is not None for use in op.uses)
        return WITHIN if piece is not None and around else piece

    def _looked_up(self, held: Held, target: Path, index: Path) -> Held:
        """What lies in a table under the number may know the number; under several it is a copy."""
        copied = self.acquisition.several and index in self._wholes and index in held.places
        told = self.acquisition.value is Value.INDEX and not copied and self._about(held, index)
        return replace(held, maybe=held.maybe | {(*target, AT)}) if told else held

    @cached_property
    def _wholes(self) -> frozenset[Path]:
        """Names of all that was acquired together, as opposed to one of it."""
        return names_of(self.graph, self.acquisition.places)

    def _next(self, node: int, op: Next, held: Held, edge: Edge) -> Held | None:
        if edge in RAISING:
            return held
        if begins_behind(self.graph, self.site, op):
            return self._rebind(node, held, op.target, []) if edge is not Edge.EXHAUSTED else held
        holding, element = held, (*op.source, "[*]")
        inside = [place for place in held.places if begins_with(place, op.source)]
        if self.effects.ends_itself(self.acquisition.protocol):
            inside = [place for place in inside if begins_with(place, element)]
            holding = replace(held, places=frozenset(inside))  # the lines of a file are not the file
        if edge is Edge.EXHAUSTED:
            numbers = self.acquisition.value is Value.INDEX and not self._told_which(op)
            counting = (op.counted or numbers) and (
                self.acquisition.value is not Value.TENSOR
                or any(piece.startswith("[") for place in held.places for piece in place)
            )
            numbered = any(begins_with(place, element) for place in held.maybe)  # by what it is found by
            turns = op.turns or inside or numbered or counting or self._has_one_for_each(op, held)
            if turns and node not in held.seen:
                return None  # the container is not empty while it holds the lease, nor is a count over it
            return replace(held, seen=held.seen - {node})
        if self.acquisition.listed and op.element is not None:
            holding, held = self._gone_over(node, held, op.element)
        copied = [self._copied(holding, op.target, op.element)] if op.element is not None else []
        after = self._rebind(node, held, op.target, copied)
        return replace(after, seen=after.seen | {node}) if after is not None else after

    def _has_one_for_each(self, op: Next, held: Held) -> bool:
        """It goes over what the acquire's loop went over, or over what each of that gave."""
        return op.source in held.noted or (bool(held.noted) and op.source in as_many(self.graph, held.noted))

    def _told_which(self, op: Next) -> bool:
        """`def poll(self, done): for rid in done: give(self.held.pop(rid))`: there may be none of them."""
        return self.site < 0 and len(op.source) == 1 and op.source[0] in self.parameters

    def _store(self, node: int, op: Store, held: Held) -> Held | None:
        if self._is_no_end(op, held):
            return held
        if op.key in held.places and self._is_kept_as_a_key(op):
            self.endings.taken.add(node)
            return None
        value = self.acquisition.value
        copied = value is Value.TENSOR or op.source in self._rows_of_numbers(held)
        if op.sliced and (copied or self._copies_into_another(op, held)):
            return held
        if node in self._shared_keys and held.stale and all(at[0] == op.target[0] for at in held.places):
            self._lose(Loss.OVERWRITTEN, node, held)
        target = (*op.target[:-1], "[*]") if op.target[-1] == "[:]" else op.target
        sure, maybe = self._copied(held, target, op.source)
        if op.sliced and value is Value.INDEX and sure:
            sure = frozenset({target})
        if node in self._emptied_slots and any(len(place) == 1 for place in held.places):
            gone = frozenset(place for place in held.places if begins_with(place, target))
            return replace(held, places=held.places - gone)
        return self._put(node, held, target, sure, maybe)

    @cached_property
    def _emptied_slots(self) -> frozenset[int]:
        return emptied_slots(self.graph.ops)

    def _is_kept_as_a_key(self, op: Store) -> bool:
        """`self.waiting[index] = job`, where somebody gives back the keys of `waiting`."""
        field = op.target[-2] if len(op.target) > 2 else ""
        of_field = field.startswith(".") and self.acquisition.value is not Value.TENSOR
        return (
            of_field
            and self._outlives(op.target)
            and not self.acquisition.keyed
            and self.effects.ends_its_keys(field, self.acquisition.protocol)
        )

    @cached_property
    def _shared_keys(self) -> frozenset[int]:
        alike = stored_under_its_own_key(self.graph) if self.acquisition.shared else frozenset[int]()
        return stored_under_shared_keys(self.graph) | alike

    def _in_place(self, node: int, op: InPlace, held: Held) -> Held | None:
        if op.operand[:-1] in held.places and self.effects.is_absorbed(op.at, self.acquisition.protocol):
            self.endings.taken.add(node)
            return None
        if _is_reckoned(op):
            return held
        if self.acquisition.value is Value.TENSOR and not any(len(p) > len(op.operand) for p in held.places):
            return held
        if op.target in self._numbers:
            return held  # `hits += self.draft(pages)`: what is added to a number is one
        sure, maybe = self._copied(held, (*op.target, "[*]"), (*op.operand, "[*]"))
        if not sure and not maybe:
            return held
        if (to := self._for_others(node, (*op.target, "[*]"))) is not None:
            return self._escape(node, held, to, sure | ({to} if sure else NOWHERE))
        return replace(held, places=held.places | sure, maybe=held.maybe | maybe)

    @cached_property
    def _numbers(self) -> frozenset[Path]:
        """Names that begin as a number, and are only counted on."""
        begun: dict[Path, bool] = {}
        for op in self.graph.ops:
            target = getattr(op, "target", None)
            if target is not None and not isinstance(op, InPlace):
                number = isinstance(op, Constant) and type(op.value) in (int, float)
                begun[target] = number and begun.get(target, True)
        return frozenset(target for target, number in begun.items() if number)

    def _delete(self, node: int, op: Delete, held: Held) -> Held | None:
        loss = Loss.DELETED if len(op.target) == 1 else Loss.DROPPED
        gone = frozenset(place for place in held.places if begins_with(place, op.target))
        if not gone:
            return held
        named = told_by_identity(op.at)
        left = held.places - gone | ({named} if named is not None else NOWHERE)
        return self._keep(node, held, replace(held, places=left), loss)

    def _told_again(self, op: Call, held: Held) -> Held:
        """`self._held.pop(id(frame))`, whose entry is the frame."""
        named = told_by_identity(op.at) if op.receiver is not None else None
        inside = named is not None and (*(op.receiver or ()), ANY_ITEM) in held.places
        return replace(held, places=held.places | {named}) if inside and named is not None else held

    def _capture(self, node: int, op: Capture, held: Held) -> Held | None:
        """A closure that gives the lease back holds it too."""
        added: set[Path] = set()
        for place in held.places:
            name = place[0].lstrip("@")
            if name not in op.names and not (place[0].startswith("@") and reads(op.function, name)):
                continue
            if self._sees_to_it(op.function, "@" + name, place[1:]):
                added.add((*op.target, f"<{name}>", *place[1:]))
        kept = frozenset(place for place in held.places if not begins_exactly(op.target, place))
        return replace(held, places=kept | added) if added else held

    def _sees_to_it(self, function: ast.AST, name: str, rest: Path) -> bool:
        """Whether a nested function, whenever it is called, ends or keeps what it has under this name."""
        value, protocol = self.acquisition.value, self.acquisition.protocol
        done = self.effects.captured(function, name, rest, value, protocol)
        self.endings.chosen |= done.split
        return done.fate in (Fate.RELEASE, Fate.TAKE)

    def _is_no_end(self, op: Store, held: Held) -> bool:
        """`lambda done, buffer=buffer: self._sent(done, buffer)`, where that does not always end it."""
        made = isinstance(op.at, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef)
        name = op.target[-1][1:-1]
        if not made or op.target[-1] != f"<{name}>":
            return False
        within = (below(place, op.source) for place in held.places)
        return not any(rest is not None and self._sees_to_it(op.at, name, rest) for rest in within)

    def _end_statement(self, node: int, op: EndStatement, held: Held) -> Held | None:
        if not any(is_temporary(place) for place in held.places | held.maybe):
            return held
        places = frozenset(place for place in held.places if not is_temporary(place))
        maybe = frozenset(place for place in held.maybe if not is_temporary(place))
        loss = (
            Loss.DISCARDED if not held.kept else Loss.DROPPED if isinstance(op.at, ast.Expr) else Loss.REBOUND
        )
        if loss is Loss.DISCARDED and self.acquisition.recorded and not places:
            self.endings.taken.add(node)
            return None
        if not (held.kept or places) and isinstance(op.at, ast.Return) and self._is_made_anew(node, held):
            maybe = NOWHERE
        return self._keep(node, held, replace(held, places=places, maybe=maybe), loss)

    def _is_made_anew(self, node: int, held: Held) -> bool:
        """`return pool.take().copy_(rows).cpu()`"""
        returned = all(is_temporary(place) or place[0] == RESULT[0] for place in held.maybe)
        return returned and self._is_lost_all_the_same(node, held)

    def _leave(self, node: int, op: Leave, held: Held) -> None:
        """The function is left: by whom is the lease held now?"""
        endings = self.endings
        if op.way is Way.RAISE and self.acquisition.keyed and self._listed(held):
            return  # of several that were marked one after the other, none is anybody's to undo then
        outside = [] if self.acquisition.keyed else [p for p in sorted(held.places) if self._outlives(p)]
        if self.acquisition.foreign:  # `writer.transport` of a writer that is held goes with it
            outside = [place for place in outside if len(place) == 1 or place[:1] not in held.places]
        elsewhere = [place for place in outside if place not in self.acquisition.places]
        fields = [
            place for place in elsewhere or outside if not any(piece.startswith("[") for piece in place)
        ]
        fields.sort(key=lambda place: (any("<" in piece for piece in place), len(place)))
        kept = next(iter(fields), None)
        listed = self.acquisition.handle is Handle.RECEIVER and any(
            place[0] == RESULT[0] and ANY_ITEM in place for place in held.places
        )
        listed = listed or goes_with_the_result(self.graph, self.site, self.acquisition, held, op)
        lent_out = not listed and any(
            place in self.acquisition.places and self._outlives(place) for place in held.places
        )
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
            endings.beside.update((node, place) for place in outside)
            endings.together.add(frozenset(outside))
            if outside:
                endings.shared.add(node)
            return
        if held.lent or any(ON_EXIT in place and place[0] == RESULT[0] for place in held.places):
            endings.taken.add(node)
        elif outside and op.way is Way.RAISE and all(map(self.effects.dies_with_its_object, outside)):
            self._lose(Loss.RAISE, node, held)
        elif outside:
            if op.way is not Way.RAISE:
                endings.stored.setdefault(node, kept or (elsewhere or outside)[0])
                others = [place for place in held.places if place[0] == RESULT[0] or place[0][0] == "@"]
                endings.beside.update((node, place) for place in (*outside, *others))
                endings.together.add(frozenset(outside))
        else:
            losses = {Way.RETURN: Loss.RETURN, Way.FALL_THROUGH: Loss.FALL_THROUGH, Way.RAISE: Loss.RAISE}
            self._lose(losses[op.way], node, held)

    def _returned(self, node: int, held: Held) -> bool:
        """A lease that also lies in a table is the table's to count and the caller's to release."""
        results = sorted(place[1:] for place in held.places if place[0] == RESULT[0])
        each = self.acquisition.counts or self.acquisition.handle is Handle.ARGUMENT
        each |= self.acquisition.handle is Handle.RECEIVER and not self.acquisition.declared
        one = len(results) == 1 and results[0].count(ANY_ITEM) == 1
        counted = each and one and results[0][0] == ANY_ITEM  # each once for whoever gets the list
        if self.acquisition.keyed and not counted and any(ANY_ITEM in place for place in results):
            self.endings.unknown.add(node)  # others have the object, and now a list of such objects
            self.endings.kept.add(node)
            if self.acquisition.listed and results[0][0].startswith("."):
                self.endings.returned[node] = results[0]  # `return Beam(list(pages))`, all of them counted
            return True
        if results:
            self.endings.returned_too |= fields_beside(results)
            self.endings.returned.setdefault(node, together(results))
            return True
        perhaps = {place[1:] for place in held.maybe if place[0] == RESULT[0]}
        if perhaps and not answers_plainly(self.graph) and not self._is_lost_all_the_same(node, held):
            self.endings.unknown.add(node)
            self.endings.shown[node] = (AT,) if perhaps == {(AT,)} else ()
            return True
        return False

    def _is_lost_all_the_same(self, node: int, held: Held) -> bool:
        """`return self.model(buffer)`, `return list(lease.values)`: whoever gets what was made of a lease
        that was taken here has no way to it, if nobody else has."""
        known = self.acquisition.declared or any(map(self._outlives, held.places))
        if self.site < 0 or known:
            return False
        value, assigned = getattr(self.graph.ops[node].at, "value", None), assigned_in(self.graph.ops[0].at)
        numbered = self.acquisition.value not in (Value.OBJECT, Value.TENSOR)
        made = (holds_no_number if numbered else is_another_thing)(value, assigned)
        made = made or is_an_answer(value, self.graph.ops[0].at, numbered)
        ends = self._ended_by(held.places)
        if not made or self._goes_to_others(held.places, ends):
            return False
        return not is_seen_to_beside(self.graph, self.site, held.places | held.maybe, ends)

    def _ended_by(self, places: Places) -> frozenset[int]:
        """Calls that give back what is at these places, on other ways."""
        return frozenset(node for node, fate in self._fates(places) if fate is Fate.RELEASE)

    def _goes_to_others(self, places: Places, ends: frozenset[int]) -> bool:
        """On another way, by a call that is not known to borrow it."""
        return any(node not in ends and fate is not Fate.BORROW for node, fate in self._fates(places))

    def _fates(self, places: Places) -> Iterator[tuple[int, Fate]]:
        value, protocol = self.acquisition.value, self.acquisition.protocol
        for node, op in enumerate(self.graph.ops):
            if isinstance(op, Call) and node not in self.trusted and node != self.site:
                for position, operand in operands(op):
                    if operand in places:
                        yield node, self.effects.treatment(op, position, (), value, protocol).fate


def _is_reckoned(op: InPlace) -> bool:
    """`out /= ws[0]`, `scores.data += bias.data`: numbers, of which no list is made longer."""
    extends = isinstance(op.at, ast.AugAssign) and isinstance(op.at.op, ast.Add | ast.BitOr)
    return not extends or op.operand[-1] in MEMORY
