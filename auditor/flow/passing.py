"""What calls do to one lease: nothing, its end, a new holder, or something that cannot be told."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from auditor.flow.effects import BORROWED, TAKEN, Fate, Handle, Position, Treatment, Value
from auditor.flow.held import Held
from auditor.flow.identities import identities
from auditor.flow.indirect import AT, ON_EXIT, WITHIN
from auditor.flow.knowledge import EXTENDING, FILLING
from auditor.flow.lease import Loss
from auditor.flow.named_containers import named_containers
from auditor.flow.operands import KEEPING, PROCESS_POSITION, keeps_its_end, operands, tells_of
from auditor.flow.perhaps import Perhaps
from auditor.flow.places import MEMORY, OWN_ENDS, begins_with, below, part
from auditor.flow.rows import is_copied_out
from auditor.flow.seen_to_beside import CONVERTING
from auditor.flow.spelled import SHARED_POSITION, asks, gives, leads, shared_place
from auditor.flow.sums import sums
from auditor.ir.ops import ANY_ITEM, RAISING, Assume, Call, Edge, Enter, Move, Path, Store

QUEUEING = frozenset({"put", "put_nowait"})
CALLED_BACK = re.compile(
    r"add_\w*callback|call_(?:later|soon|at)|(?:push_async_)?callback|defer|finalize|register|atexit"
)
"""What is told whom to call in the end."""

MOVING = frozenset({"pop", "popleft", "insert", "remove", "reverse", "sort", "rotate"})
"""Methods of a list after which an element may stand elsewhere."""


class Passing(Perhaps):
    """The lease as an operand of calls."""

    def _call(self, node: int, call: Call, held: Held, edge: Edge) -> tuple[Held, ...]:
        if edge in RAISING and self.effects.only_releases(call):
            self._pass(node, call, held, edge)
            return ()
        held = _without_positions(call, held)
        if node == self.site:
            self._note_kept(node, held)
            held = replace(held, stale=True)
        if call.method in FILLING and call.receiver is not None and self._one_of_many(held):
            held = replace(held, noted=held.noted | {call.receiver})
        elif node != self.site:  # where it began another object is counted the next time
            held = self._counted(call, held, edge)
        fresh = self._rebind(
            node, held, call.target, [self._same_amount(call, held)], Loss.NEXT_TURN
        )  # left from an earlier turn of a loop
        return self._pass(node, call, fresh, edge) if fresh is not None else ()

    def _note_kept(self, node: int, held: Held) -> None:
        """A loop that never ends comes back to the acquire: what it left in a field by then stays there; but
        queues are there to be emptied."""
        queues = {op.receiver for op in self.graph.ops if isinstance(op, Call) and op.method in QUEUEING}
        outside = [place for place in sorted(held.places) if self._outlives(place)]
        outside = [place for place in outside if place[:-1] not in queues]
        if outside and not self.acquisition.keyed:
            self.endings.going_on.setdefault(node, outside[0])

    def _counted(self, call: Call, held: Held, edge: Edge) -> Held:
        """A further count on the same object, or a lock taken again: who ends that ends his own, not this."""
        if self.acquisition.keyed or (edge in RAISING and call.receiver not in held.places):
            return held
        other = self.effects.acquisition(call)
        if other is None or held.places.isdisjoint(other.places):
            return held
        again = other.keyed and other.protocol == self.acquisition.protocol  # a pin is ended by no count
        alike = not self._may_refuse(call) or self.effects.end_alike(
            other.protocol, self.acquisition.protocol
        )
        counts = other.counts and alike
        if not (again or (counts and edge not in RAISING)):
            return held
        kept = {
            place for place in held.places if self._outlives(place) and place not in self.acquisition.places
        }
        if kept and kept != held.places:
            return replace(held, places=held.places - kept)
        return replace(held, counted=True)

    def _is_one_more(self, node: int, call: Call) -> bool:
        """`self.cached[key] = store.retain(block)`: what that returns is held by a count of its own."""
        other = self.effects.acquisition(call) if node != self.site else None
        if other is None or not other.counts or other.handle is not Handle.RESULT:
            return False
        alike = self.effects.end_alike(other.protocol, self.acquisition.protocol)
        return alike and not self.acquisition.keyed

    def _one_of_many(self, held: Held) -> bool:
        return self.acquisition.keyed or any(ANY_ITEM in place for place in held.places)

    def _may_refuse(self, call: Call) -> bool:
        """`if not bus.take_turn():`, a lock of the bus and no further count of it."""
        return any(isinstance(op, Assume) and op.subject == call.target for op in self.graph.ops)

    def _pass(self, node: int, call: Call, held: Held, edge: Edge) -> tuple[Held, ...]:
        """The call is given the lease, or is not."""
        after = held if edge in RAISING else _without_removed(call, held)
        if (place := self._shared) is not None and edge in RAISING and leads(call, place):
            return ()
        if place is not None and edge not in RAISING and gives(call, place):
            after = replace(after, places=after.places | {call.target})
        if node in self._ended_by_key or node in self.acquisition.until:
            ended = self._ended(node, held, edge, Fate.RELEASE)
            return (ended,) if ended is not None else ()
        split = False
        given = [*self._operands(call), *self._given_by_what_it_says(call, held)]
        rows, within = self._rows_of_numbers(held), _goes_into_itself(call, held)
        if after != held:
            given = [(position, operand) for position, operand in given if position != 0]  # it goes nowhere
        places = sorted(held.places)
        roots = {place[0] for place in (*places, *held.maybe)}
        for position, operand in given:
            if operand[0] not in roots:
                continue
            if rows and is_copied_out(call, operand, rows):
                continue
            passed = self._pass_perhaps(node, call, held, after, edge, position, operand, given)
            if passed is None:
                self.endings.unknown.add(node)
                return ()
            after = passed
            for place in places:
                if within and below(place, operand) is None:
                    continue  # `self.seen.extend(self.page.marks)` of the object that is followed
                treatment = self._treatment(call, position, operand, place)
                if treatment is None or treatment == BORROWED:
                    continue
                if (listed := self._lists_a_part(node, operand, place, treatment)) is not None:
                    after = replace(after, maybe=after.maybe | {(*listed, ANY_ITEM)})
                    continue
                split = split or treatment.split
                if treatment.split and treatment.says and edge not in RAISING:
                    told = frozenset((call.target[0] + key, truth) for key, truth in treatment.says)
                    self.told[node, held] = told
                passed = self._treated(node, call, after, edge, place, treatment)
                if passed is None:
                    return (held,) if treatment.split else ()
                after = passed
        if edge not in RAISING:
            after = self._made_of_it(call, held, after)
        if after == held:
            return (held,)
        kept = self._keep(node, held, after, Loss.DROPPED)
        if kept is None:
            return ()
        return (kept, held) if split else (kept,)

    def _pass_perhaps(
        self, node: int, call: Call, held: Held, after: Held, edge: Edge,
        position: Position, operand: Path, given: list[tuple[Position, Path]],
    ) -> Held | None:  # fmt: skip
        """The same for what the operand may be, or may have in it; None where nobody knows what becomes of
        the lease then."""
        if self._by_another_name(call, position, operand, held):
            return None
        within = _goes_into_itself(call, held)
        perhaps = [] if within else list(self._perhaps_given(call, position, operand, held))
        if perhaps and any(self._inside(held, other) is not None for _, other in given):
            # `Draft(lane, list(lane.tokens))` is made around the lane, whatever its tokens are
            perhaps = [treatment for treatment in perhaps if treatment.fate is not Fate.BORROW]
        if perhaps and self.acquisition.value is Value.INDEX and self._lends_another(call):
            perhaps = [each for each in perhaps if each.moved_to is None]  # `card.register(slot * size)`
        if perhaps and (self._is_converted(operand) or self._lists_what_it_says(call, held)):
            listed = frozenset(each.moved_to for each in perhaps if self._is_listed_here(each))
            perhaps = [treatment for treatment in perhaps if not self._is_listed_here(treatment)]
            to = frozenset(place for place in listed if place is not None and edge not in RAISING)
            after = replace(after, maybe=after.maybe | to)
        if self.believing and edge not in RAISING:
            listing = [each for each in perhaps if each.fate is Fate.BORROW and each.moved_to]
            perhaps = [each for each in perhaps if each not in listing]
            for each in listing:
                after = self._kept_beside(after, operand, each.moved_to or ())
        if any(self._ends_or_moves(treatment) for treatment in perhaps):
            if not self._lent_perhaps(node, operand, held, perhaps):
                return None
            self.trusting.add(node)
        if edge not in RAISING and any(treatment.result is not None for treatment in perhaps):
            after = replace(after, maybe=after.maybe | {call.target})
        return after

    def _made_of_it(self, call: Call, held: Held, after: Held) -> Held:
        """What the call answers may be a part of the lease, or have its contents."""
        if self._leads_within(call, held):
            after = replace(after, maybe=after.maybe | {(*call.target, WITHIN)})
        if self._made_of_contents(call, held):
            after = replace(after, maybe=after.maybe | {(*call.target, AT)})
        return after

    def _given_by_what_it_says(self, call: Call, held: Held) -> Iterator[tuple[Position, Path]]:
        """`pool.free(buffer.data_ptr())`, `pool.free(pages + more)`: who goes by what it says, or by its
        items, gives it back; others have not got it."""
        for position, operand in operands(call) if call.at.args and self._stand_for else ():
            for asked in self._stand_for.get(operand, ()) if position != -1 else ():
                treatments = (self._treatment(call, position, asked, place) for place in held.places)
                if any(each is not None and each.fate is Fate.RELEASE for each in treatments):
                    yield position, asked

    @cached_property
    def _stand_for(self) -> dict[Path, tuple[Path, ...]]:
        ops = self.graph.ops
        return {path: (asked,) for path, asked in identities(ops).items()} | sums(ops)

    def _is_converted(self, operand: Path) -> bool:
        """`buffer.to(device)`, by itself or under a name."""
        names = {operand[:1]}
        for op in self.graph.ops:
            if isinstance(op, Move) and op.target == operand[:1] and len(op.source) == 1:
                names.add(op.source)
        calls = (op for op in self.graph.ops if isinstance(op, Call) and op.target in names)
        return any(call.method in CONVERTING for call in calls)

    def _lists_what_it_says(self, call: Call, held: Held) -> bool:
        """`mapping.append((old.number, new.number))` beside `fresh.append(new)`."""
        local = any(ANY_ITEM in place and not self._outlives(place) for place in held.places)
        return local and call.method in FILLING and self.acquisition.value is Value.INDEX

    def _is_listed_here(self, treatment: Treatment) -> bool:
        """`parts.append(buffer.to(device))`: it is the list that may hold it now."""
        to = treatment.moved_to
        return to is not None and treatment.fate is Fate.BORROW and not self._outlives(to)

    def _lists_a_part(self, node: int, operand: Path, place: Path, treatment: Treatment) -> Path | None:
        """`slots.append(lease.slot)`: the list may lead to the lease that was taken here, and is not it;
        unless the lease itself goes to others afterwards."""
        call = self.graph.ops[node]
        assert isinstance(call, Call)
        if self.site < 0 or treatment.fate is not Fate.UNKNOWN or call.method not in FILLING:
            return None
        later = self.graph.ops[node + 1 :]
        given = (path for op in later if isinstance(op, Call) for _, path in operands(op))
        if place in given or any(isinstance(op, Store) and op.source == place for op in later):
            return None
        into = call.receiver
        if into is None or into[0] in self.parameters or self._outlives(into):
            return None
        return into if len(operand) > len(place) else None

    def _operands(self, call: Call) -> list[tuple[Position, Path]]:
        given = operands(call)
        if CALLED_BACK.fullmatch(call.method):  # `task.add_done_callback(permit.leave)` is told of the permit
            given += [
                (at, path[:-1]) for at, path in given if len(path) == 2 and isinstance(at, int) and at >= 0
            ]
        if self.acquisition.handle is Handle.NONE:
            given.append((PROCESS_POSITION, self.acquisition.places[0]))
        if (place := self._shared) is not None:
            again = asks(call, place)
            given.append((-1, place) if again else (SHARED_POSITION + place[0], place[:1]))
        return given

    def _is_a_mere_note(self, to: Path) -> bool:
        """The key goes into a field of which nobody knows who ends what it stands for:
        `self.active[name] = slot` in a callee that is told a name."""
        fields = [piece for piece in to if piece.startswith(".")]
        return bool(fields) and not self.effects.is_ended_through(fields[-1], self.acquisition.protocol)

    def _says_only_how_much(self, call: Call, place: Path) -> bool:
        """`self.waiting.append(request)` behind `budget.take(request.wanted)`, by which nobody gives back."""
        if self.acquisition.value is not Value.AMOUNT or not place[-1].startswith("."):
            return False
        told = any(path == place for _, path in operands(call))
        return not (told or self.effects.is_named_to_an_end(place[-1], self.acquisition.protocol))

    @cached_property
    def _shared(self) -> Path | None:
        return shared_place(self.acquisition)

    def _lends_another(self, call: Call) -> bool:
        """`copy = self._shuffle(page)`, a page that the callee takes from the pool."""
        other = self.effects.acquisition(call)
        return other is not None and other.handle is Handle.RESULT

    def _treated(
        self, node: int, call: Call, held: Held, edge: Edge, place: Path, treatment: Treatment
    ) -> Held | None:
        if treatment.fate is Fate.UNKNOWN and node in self.trusted and not treatment.split:
            self.trusting.add(node)
            if edge in RAISING or self._lends_another(call):
                return held
            return replace(held, maybe=held.maybe | {call.target})
        if treatment.split:
            self.endings.sometimes.add(node)
        if treatment.fate is not Fate.BORROW:
            if edge in RAISING and call.method == "submit" and treatment.fate is Fate.TAKE:
                return held  # a pool of threads that is shut down has not got it
            if treatment.later:
                self.endings.later.setdefault(node, held)
            return self._ended(node, held, edge, treatment.fate)
        if edge in RAISING:
            queued = treatment.moved_to is not None and self._outlives(treatment.moved_to)
            return None if queued and call.method == "put" and _waits(call) else held
        places, maybe = held.places, held.maybe
        if treatment.result is not None and not self._is_one_more(node, call):
            result = call.target + treatment.result
            listed = treatment.result and treatment.result[0].startswith("[")
            self._goes_by(result if listed else call.target, place)  # `max(beams)` is one of them
            if treatment.maybe and not treatment.split:
                maybe |= {result}
            else:
                places |= {result}
        if treatment.moved_to is not None and self.acquisition.keyed and self._outlives(treatment.moved_to):
            if node in self.trusted and tells_of(call, place):
                self.trusting.add(node)
                return held
            if call.method not in KEEPING and self._is_a_mere_note(treatment.moved_to):
                return held
            if self._says_only_how_much(call, place):
                return held
            self.endings.unknown.add(node)
            self.endings.kept.add(node)
            self.endings.noted.add((node, treatment.moved_to))
            return None
        if treatment.moved_to is not None:
            if self._watched.get(treatment.moved_to[:1], node) < node:
                self.endings.taken.add(node)
                return None
            if (to := self._for_others(node, treatment.moved_to)) is not None:
                escaped = self._escape(node, held, to, frozenset({to, treatment.moved_to}))
                answered = places - held.places
                return replace(escaped, places=escaped.places | answered) if escaped is not None else None
            places |= {treatment.moved_to}
        if treatment.leaves:
            places -= {place, *self._in_the_field(place, held)}
        return replace(held, places=places, maybe=maybe - places)

    def _in_the_field(self, place: Path, held: Held) -> Iterator[Path]:
        """The other places of what `row.pop()` takes out, of `row = self.rows[key]`."""
        container = self._named_containers.get(place[:1])
        if container is not None:
            whole = (*container, *place[1:])
            yield from (each for each in held.places if len(each) == len(whole) and begins_with(each, whole))

    @cached_property
    def _named_containers(self) -> Mapping[Path, Path]:
        return named_containers(self.graph.ops)

    def _on_exit(self, context: Path, held: Held) -> bool:
        """Whether the end of this `with` runs the exit that was put on the stack for the lease."""
        stacks = (place[: place.index(ON_EXIT)] for place in held.places if ON_EXIT in place)
        return any(self._contexts.get(stack, stack) == context for stack in stacks)

    @cached_property
    def _contexts(self) -> dict[Path, Path]:
        """What `with context as name:` enters, by the names for it."""
        contexts: dict[Path, Path] = {}
        for op in self.graph.ops:
            match op:
                case Enter(target=target, context=context):
                    contexts[target] = context
                case Move(target=target, source=source) if source in contexts:
                    contexts[target] = contexts[source]
        return contexts

    @cached_property
    def _watched(self) -> dict[Path, int]:
        """`with closing_all(files):` has the list, and sees to what is put into it further on: from which
        node on, in the order of the lines."""
        calls = [(node, op) for node, op in enumerate(self.graph.ops) if isinstance(op, Call) and op.entered]
        return {path: node for node, op in reversed(calls) for path, _ in op.args}

    def _is_its_end(self, operand: Path, place: Path) -> bool:
        if operand[:-1] != place:
            return False
        method = operand[-1]
        return method in OWN_ENDS or self.effects.is_own_end(method[1:], self.acquisition.protocol)

    def _treatment(self, call: Call, position: Position, operand: Path, place: Path) -> Treatment | None:
        acquisition = self.acquisition
        if keeps_its_end(call, position, operand) and below(place, operand[:-1]) is not None:
            return TAKEN
        its_end = position != -1 and self._is_its_end(operand, place)
        if its_end and acquisition.handle is Handle.RECEIVER:
            return TAKEN  # `response.on_close(gate.release)`: whoever was given the end has it to call
        if its_end and (put := self.effects.put_on_a_stack(call)) is not None:
            return put
        rest = below(place, operand)
        if rest is not None and operand[-1] == ANY_ITEM and (named := _under_a_key(call, operand, place)):
            position = named
        if rest is not None:
            return self.effects.treatment(call, position, rest, acquisition.value, acquisition.protocol)
        piece = part(place, operand, acquisition)
        if piece is None or (piece == "maybe" and acquisition.keyed):
            return None  # a pin or a lock is not undone through what the object holds
        if piece == "maybe" and position == -1 and call.method == "clone" and self._is_memory(operand):
            return None  # `lease.data[:size].clone()` is a tensor of its own
        treatment = self.effects.treatment(call, position, (), acquisition.value, acquisition.protocol)
        if position == -1 and piece == "maybe" and treatment.fate is Fate.RELEASE and call.args:
            return None  # `connection.root.release(number)` gives back the number
        if piece == "same" or treatment.fate is Fate.RELEASE:
            return treatment
        if operand[-1] == ".name" and self._is_file():
            return None  # `os.replace(temporary.name, target)`: who has the file's name has not the file
        if treatment.fate is Fate.BORROW and treatment.moved_to is None:
            return Treatment(result=(), maybe=True) if treatment.result is not None else None
        if treatment.fate is Fate.UNKNOWN and acquisition.value is Value.OBJECT:
            return None  # what is told the offset of a lease has not the lease
        return Treatment(Fate.UNKNOWN)

    def _is_memory(self, operand: Path) -> bool:
        """Of an object that may stand for numbers its fields may be these, in a tensor."""
        return self.acquisition.value is Value.OBJECT or not MEMORY.isdisjoint(operand)

    def _is_file(self) -> bool:
        """Of a directory the name is all that anybody needs."""
        acquisition = self.acquisition
        return (
            acquisition.declared
            and acquisition.value is Value.OBJECT
            and not acquisition.text.lower().endswith("directory")
        )

    def _ended(self, node: int, held: Held, edge: Edge, fate: Fate) -> Held | None:
        """Released and taken count on the raising edge too: who was given it answers for it."""
        if held.counted and fate in (Fate.RELEASE, Fate.TAKE):
            return replace(held, counted=False)
        if fate is Fate.RELEASE:
            self.endings.released.setdefault(node, held)
        elif fate is Fate.TAKE:
            self.endings.taken.add(node)
        elif edge in RAISING or any(self._outlives(place) for place in held.places):
            return held  # whoever was lent it, the object that holds it still answers for it
        else:
            self.endings.unknown.add(node)
        return None


def _goes_into_itself(call: Call, held: Held) -> bool:
    """`page.rows.append(page.rows[-1])`: whatever may be a part of the lease is one afterwards."""
    into = call.receiver if call.method in FILLING | EXTENDING else None
    return into is not None and any(below(into, place) is not None for place in held.places)


def _under_a_key(call: Call, operand: Path, place: Path) -> str | None:
    """`f(**{"log": x})`: the parameter that gets what the dict holds under a known key."""
    if len(place) < len(operand) or (None, operand[:-1]) not in call.kwargs:
        return None
    key = place[len(operand) - 1]
    return key[2:-2] if key.startswith(("['", '["')) else None


def _without_removed(call: Call, held: Held) -> Held:
    """`self.running.remove(request)`, where what the request holds is found in both."""
    if call.method not in ("remove", "discard") or call.receiver is None or len(call.args) != 1:
        return held
    found = (below(place, call.args[0][0]) for place in held.places)
    gone = {(*call.receiver, ANY_ITEM, *rest) for rest in found if rest is not None}
    return replace(held, places=held.places - gone)


def _without_positions(call: Call, held: Held) -> Held:
    """`pair.pop()`: what was `pair[0]` may be another one, or gone."""
    if call.method not in MOVING or call.receiver is None:
        return held
    whole = len(call.receiver)
    lying = {
        place
        for place in held.places
        if place[:whole] == call.receiver and place[whole : whole + 1] and place[whole][1:-1].isdecimal()
    }
    if not lying:
        return held
    somewhere = {(*call.receiver, ANY_ITEM, *place[whole + 1 :]) for place in lying}
    return replace(held, places=held.places - lying | somewhere)


def _waits(call: Call) -> bool:
    """`queue.put(x)` waits as long as it takes; only with a limit does it say that the queue is full."""
    return len(call.args) == 1 and not call.kwargs
