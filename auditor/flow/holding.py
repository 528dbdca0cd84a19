"""Where one lease is held, and what a new binding, a store or an escape changes about that."""

import ast
from collections.abc import Set
from dataclasses import replace
from functools import cached_property

from auditor.flow.effects import Acquisition, Effects, Fate, Handle, Value
from auditor.flow.field_names import names_of_fields
from auditor.flow.held import NOWHERE, Endings, Held, Places
from auditor.flow.indirect import AT, OVER, without_contents
from auditor.flow.knowledge import EXTENDING, FILLING, Knowledge
from auditor.flow.known_before import KnownBefore
from auditor.flow.lease import Loss
from auditor.flow.noted_and_ended import ended_behind
from auditor.flow.operands import operands
from auditor.flow.places import GIVEN, OWN_ENDS, begins_exactly, begins_with, below, escaped, named, part
from auditor.flow.rows import out_of_a_row, views
from auditor.flow.seen_to_beside import assigned_in, is_another_thing, is_seen_to_beside
from auditor.flow.transactions import stays_open
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    ANY_ITEM,
    ITERATED,
    Call,
    InPlace,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    is_temporary,
)

OWN_OBJECT = frozenset({("self",), ("this",)})
"""What a method enters as `with self:`; its own exit says what that gives back."""


OUT_OF = frozenset({"values", "items", "keys", "pop", "popleft", "popitem"})
"""Methods of containers by which what lies in them comes out."""


class Holding:
    """The places of one lease in one function, and how it stops having any."""

    def __init__(
        self,
        graph: Graph,
        effects: Effects,
        acquisition: Acquisition,
        site: int,
        lends: bool,
        trusted: frozenset[int] = frozenset(),
        others: frozenset[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.effects = effects
        self.acquisition = acquisition
        self.site = site
        self.lends = lends  # a context manager's yield gives nothing away
        self.trusted = trusted  # calls of unknown functions that are taken to borrow
        self.others = others  # names of what is surely another thing
        self.trusting: set[int] = set()  # those of them that were given the lease
        self.believing = False  # that what is kept of the work with the lease is another thing
        self.kept_perhaps: set[tuple[str, Path]] = set()  # names of such things, and where they are kept
        self.parameters = frozenset(graph.parameters)
        self.own_roots = set(graph.fresh_roots)  # names of what nobody else knows
        self.shown_roots: set[str] = set()  # of lists of what others know, and of what is taken from those
        if _made_for_caller(site, acquisition):
            self.own_roots.add(acquisition.places[0][0])
        self.endings = Endings()
        self.by_generator = acquisition.by_generator
        self.known_before = KnownBefore(graph, effects, acquisition.protocol, self._escaped)
        self.told: dict[tuple[int, Held], Knowledge] = {}  # what a call's result says where it left the lease

    def _rows_of_numbers(self, held: Held) -> Places:
        """Where the lease lies, if it is a row of numbers, but for what shows its memory."""
        return held.places - self._views if self.acquisition.plain else NOWHERE

    @cached_property
    def _views(self) -> Places:
        return views(self.graph)

    def _inside(self, held: Held, operand: Path) -> Path | None:
        """Where in the operand the lease is, over all its places."""
        if out_of_a_row(operand, self._rows_of_numbers(held)):
            return None
        for place in sorted(held.places):
            rest = below(place, operand)
            if rest is not None:
                return rest
            if part(place, operand, self.acquisition) == "same":
                return ()
        return None

    def _about(self, held: Held, operand: Path) -> bool:
        """Whether the operand is the lease, holds it, or was computed from it."""
        return self._inside(held, operand) is not None or any(
            below(place, operand) is not None for place in held.maybe
        )

    def _ended_behind(self, held: Held, context: Path, at: ast.AST) -> bool:
        """Whether `with context:` gives the lease back where it ends."""
        if stays_open(self.graph, self.acquisition.text, context) or context in OWN_OBJECT:
            return False
        inside = self._inside(held, context)
        if inside is None or OVER in inside:
            return False
        value, protocol = self.acquisition.value, self.acquisition.protocol
        return not self.effects.owed_behind_its_with(at, inside, value, protocol)

    def _copied(self, held: Held, target: Path, source: Path) -> tuple[Places, Places]:
        """Places, and maybe-places, that `target = source` adds."""
        sure: set[Path] = set()
        maybe: set[Path] = set()
        if out_of_a_row(source, self._rows_of_numbers(held)):
            return NOWHERE, NOWHERE
        for place in held.places:
            rest = below(place, source)
            if rest is not None:
                sure.add(target + rest)
                self._goes_by(target, place)
                continue
            piece = part(place, source, self.acquisition)
            if source[-1] == ".name" and source[:-1] == place:
                continue  # `temporary.name`: whoever has the file's name has not the file
            if piece == "maybe" and self.acquisition.keyed and self.acquisition.value is Value.OBJECT:
                continue  # `guest.table`: a hold is not undone through what the object has
            if piece is not None:
                (sure if piece == "same" else maybe).add(target)
            elif source[-1] in OWN_ENDS and below(place, source[:-1]):
                maybe.add(target)  # `return grant.close` of a grant that it lies in
        for place in held.maybe:
            rest = below(place, source)
            if rest is not None:
                maybe.add(target + rest)
            elif self.acquisition.value is Value.INDEX and part(place, source, self.acquisition) == "same":
                maybe.add(target)  # one of what may be the numbers
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
        within = target not in held.places and target == (self._key_root(),)
        if self.acquisition.keyed and within and not self._listed(held):
            self.endings.unknown.add(node)
            return None
        if target in held.noted:
            held = replace(held, noted=held.noted - {target})
        kept = frozenset(place for place in held.places if not begins_exactly(target, place))
        outside = [place for place in sorted(held.places - kept) if self._outlives(place)]
        outside = [
            place for place in outside if not (self.acquisition.keyed and place in self.acquisition.places)
        ]
        if outside and len(target) == 1 and self.site < 0 and any(sure for sure, _ in gained):
            kept |= {GIVEN}  # `head = head.next` of a chain that the caller has: what follows is about it
        elif outside and len(target) == 1:
            self.endings.stored.setdefault(node, outside[0])  # the name moves on, the object keeps it
            return None
        maybe = frozenset(place for place in held.maybe if not begins_exactly(target, place))
        for sure, perhaps in gained:
            kept |= sure
            maybe |= perhaps
        if kept == held.places and maybe == held.maybe:
            return held
        return self._keep(node, held, replace(held, places=kept, maybe=maybe - kept), loss)

    def _goes_by(self, name: Path, other: Path) -> None:
        """What lies in an object that was made here nobody else knows by another name either; but the list
        `list(self.running)` is full of what others know."""
        if other[0] in self.shown_roots or self._outlives(other):
            self.shown_roots.add(name[0])
        elif len(name) == 1 and other[0] in self.own_roots and name[0] not in self.parameters:
            self.own_roots.add(name[0])

    def _outlives(self, place: Path) -> bool:
        filled = place in self.acquisition.places  # `self.prepare(request)`
        return self._escaped(place) or (filled and self._known(self.site, place) is not None)

    def _for_others(self, node: int, place: Path) -> Path | None:
        """What others call the place; None where nobody else knows it."""
        known = self._known(node, place)
        if known is None:
            return place if self._outlives(place) or self._of_another(place) else None
        return (*known, *place[1:]) if known else place

    def _of_another(self, place: Path) -> bool:
        """`stash().reservation = lease`: a field of what a call answers with, and does not make."""
        return len(place) > 1 and place[0] in self._answered

    @cached_property
    def _answered(self) -> frozenset[str]:
        calls = (op for op in self.graph.ops if isinstance(op, Call) and is_temporary(op.target))
        return frozenset(op.target[0] for op in calls if not op.method.lstrip("_")[:1].isupper())

    def _known(self, node: int, place: Path) -> Path | None:
        return self.known_before.place(place[0], node) if len(place) > 1 else None

    @cached_property
    def _bound_anew(self) -> frozenset[str]:
        """Parameters that only ever hold the lease because they were bound to it: `out = out or Lease(pool)`.
        Into what the caller has given nothing is put."""
        filled = {op.target[0] for op in self.graph.ops if isinstance(op, Store | InPlace)}
        calls = (op for op in self.graph.ops if isinstance(op, Call) and op.receiver)
        filled |= {op.receiver[0] for op in calls if op.receiver and op.method in FILLING | EXTENDING}
        bound = {op.target[0] for op in self.graph.ops if isinstance(op, Move) and len(op.target) == 1}
        told = {place[0] for place in self.acquisition.places}
        return frozenset((self.parameters & bound) - filled - told) if self.site >= 0 else frozenset()

    def _escaped(self, place: Path) -> bool:
        if place[0] in self._bound_anew:
            return False
        return place not in self.acquisition.listed and escaped(place, self.parameters, self.own_roots)

    def _listed(self, held: Held) -> bool:
        """What was marked is in a list of this function, which may go over that to unmark it."""
        return any(ANY_ITEM in place and not self._outlives(place) for place in held.places)

    def _gone_over(self, node: int, held: Held, element: Path) -> tuple[Held, Held]:
        """What the loop's name may be now, and what is held. The next turn marks another one; a loop behind
        that goes over the marked ones knows which of them it unmarks."""
        marked = frozenset(place for place in held.places if place in self.acquisition.listed)
        if node in held.seen:
            return replace(held, places=held.places - marked), held
        copied = {place for place in held.places if place[0].startswith(ITERATED)}
        again = any(begins_with(place, element) for place in marked | copied)
        return held, replace(held, lent=held.lent or again)

    def _key_root(self) -> str:
        return self.acquisition.places[0][0]

    def _keep(self, node: int, before: Held, after: Held, loss: Loss) -> Held | None:
        """Unless nothing holds the lease any more."""
        if after.places:
            return after if after.kept or not named(after.places) else replace(after, kept=True)
        if before.lent:
            self.endings.taken.add(node)
        elif self._perhaps_left(before, after) and not self._is_lost_with(node, before, after):
            self.endings.unknown.add(node)
        else:
            again = before.stale or self._next_comes(node) or self._marked_again(node)
            if loss is Loss.REBOUND and (again or before.parted):
                loss = Loss.DROPPED if before.parted else Loss.NEXT_TURN
            self._lose(loss, node, before)
        return None

    def _next_comes(self, node: int) -> bool:
        """A generator's element gives way to the next one."""
        return self.by_generator and isinstance(self.graph.ops[node], Next | Unpack)

    def _marked_again(self, node: int) -> bool:
        """The name of what was marked means another one in the next turn, which marks that."""
        if self.acquisition.handle is Handle.RESULT or self.site < 0:
            return False
        at, site = self.graph.ops[node].at, self.graph.ops[self.site].at
        return getattr(at, "lineno", 0) <= getattr(site, "lineno", 0)

    def _perhaps_left(self, before: Held, after: Held) -> bool:
        """What lies under a number that had a name is no second name of it; `page = pages[pool.take()]` is
        the only one, the table itself none."""
        if before.kept:
            return bool(without_contents(after.maybe) - self._fields_by_name)
        return any(place[-1] != AT or not place[-2].startswith("[") for place in after.maybe)

    def _is_mere_local(self, places: Places) -> bool:
        """Of an object that a pool of the tree lent to this function: a number, or what the language opens,
        may be found again by what was made of it."""
        known = self.acquisition.declared or self.acquisition.value not in (Value.OBJECT, Value.TENSOR)
        return self.site >= 0 and not known and not any(map(self._outlives, places))

    def _is_lost_with(self, node: int, before: Held, after: Held) -> bool:
        """`rows = torch.where(seen, rows / penalty, rows)` of a lease that was taken here: nobody ends or
        keeps what is left of it."""
        if not before.kept or not self._is_mere_local(before.places | after.maybe):
            return False
        roots = self._names_for({place[0] for place in after.maybe})
        if any(self._may_go_on(op, roots) for op in self.graph.ops[node + 1 :]):
            return False
        assigned = assigned_in(self.graph.ops[0].at)
        lists = (place[0] for place in after.maybe if ANY_ITEM in place)
        if not all(is_another_thing(ast.Name(name), assigned) for name in lists):
            return False  # `parts.append(buffer.to(device))`: it may be there already, and the same
        return not is_seen_to_beside(self.graph, self.site, before.places | after.maybe)

    def _names_for(self, roots: Set[str]) -> Set[str]:
        """With the names of what is taken out of them one by one: `for number in numbers: free(number)`."""
        found = set(roots)
        for op in self.graph.ops:
            match op:
                case Next(target=(name,), source=source) | Move(target=(name,), source=source):
                    found |= {name} if source[0] in found else set()
                case Call(target=(name, *_), receiver=(root, *_)) if root in found and op.method in OUT_OF:
                    found.add(name)
        return found

    def _may_go_on(self, op: Op, roots: Set[str]) -> bool:
        """Whether it stores, ends, or may keep what goes by such a name."""
        if not isinstance(op, Call):
            return isinstance(op, Store) and op.source[0] in roots
        value, protocol = self.acquisition.value, self.acquisition.protocol
        return any(
            self.effects.treatment(op, position, (), value, protocol).fate is not Fate.BORROW
            for position, operand in operands(op)
            if operand[0] in roots
        )

    @cached_property
    def _fields_by_name(self) -> frozenset[Path]:
        """`target = lease.storage`, of an object that a pool of the tree lends: whoever is told `target` has
        not the lease, as if he were told `lease.storage`. Not what some call here ends."""
        if self.acquisition.value is not Value.OBJECT or self.acquisition.declared:
            return frozenset()
        names = names_of_fields(self.graph.ops, self.parameters)
        return frozenset(name for name in names if not self._is_ended(name))

    def _is_ended(self, name: Path) -> bool:
        value, protocol = self.acquisition.value, self.acquisition.protocol
        given = (
            (op, position)
            for op in self.graph.ops
            if isinstance(op, Call)
            for position, operand in operands(op)
            if operand[:1] == name
        )
        return any(
            self.effects.treatment(op, position, (), value, protocol).fate in (Fate.RELEASE, Fate.TAKE)
            for op, position in given
        )

    def _lose(self, loss: Loss, node: int, held: Held) -> None:
        entry = (loss, node, held)
        if entry not in self.endings.lost and not held.to_come:
            self.endings.lost.append(entry)

    def _put(self, node: int, held: Held, target: Path, sure: Places, maybe: Places) -> Held | None:
        """The lease is (perhaps) stored at `target`."""
        gone = frozenset(
            place
            for place in held.places
            if len(target) > 1 and "[*]" not in target and begins_with(place, target) and place not in sure
        )
        if sure and self.acquisition.keyed and self._outlives(target):
            if ended_behind(self.graph, self.effects, self.acquisition, held.places, node):
                return held
            self.endings.unknown.add(node)  # others can reach the object now
            self.endings.kept.add(node)
            self.endings.noted.update((node, place) for place in sure)
            return None
        inside = (place for place in held.places - sure if place[: len(target)] == target != place)
        if sure and any(map(self._outlives, inside)):
            self.endings.unknown.add(node)  # `self.last.next = chunk`, and `self.last = chunk`: in a chain
            return None
        if not sure and any(len(target) > len(place) and begins_with(target, place) for place in held.places):
            return held  # `self.segments[:n] = self.count`: a part of it in another part
        if sure or maybe:
            if (to := self._for_others(node, target)) is not None:
                if self.believing and not sure:
                    return self._kept_beside(held, getattr(self.graph.ops[node], "source", target), to)
                return self._escape(node, held, to, sure | {to + place[len(target) :] for place in sure})
            after = replace(held, places=held.places | sure, maybe=held.maybe | (maybe - sure))
            return self._keep(node, held, after, Loss.OVERWRITTEN)
        if gone:
            return self._keep(node, held, replace(held, places=held.places - gone), Loss.OVERWRITTEN)
        return held

    def _kept_beside(self, held: Held, thing: Path, to: Path) -> Held:
        """`self.results[key] = out` of what the work with the lease gave: it may be seen to afterwards."""
        self.kept_perhaps.add((thing[0], to))
        return replace(held, maybe=held.maybe | {to})

    def _escape(self, node: int, held: Held, target: Path, sure: Places) -> Held | None:
        if sure and held.counted:
            return replace(held, counted=False)
        if held.to_come:
            self.endings.unknown.add(node)  # whoever has the generator may ask it
            return None
        if not sure:
            if any(self._outlives(place) for place in held.places):
                return held  # something that may be the same is kept elsewhere; its owner is known
            self.endings.unknown.add(node)
            return None
        others = target[0] in self.parameters or target[0][0] == "@" or self._is_noted_later(target, node)
        if others or self._is_cleared(target) or self._is_removed(target, held):
            self.endings.written.add(node)
            return replace(
                held, places=held.places | sure, kept=True
            )  # the same function may still give it back
        self.endings.stored.setdefault(node, min(sure))
        return None

    def _is_noted_later(self, target: Path, node: int) -> bool:
        """`request = self.waiting.popleft()`, `request.slot = slot`, `self.running[rid] = request`: what the
        table loses is lost with it. Of an object that gets more than one thing others say which of them is
        forgotten."""
        if len(target) == 1:
            return False
        answers = {op.target for op in self.graph.ops if isinstance(op, Call)}
        given = {
            op.target[1]
            for op in self.graph.ops
            if isinstance(op, Store) and len(op.target) > 1 and op.target[:1] == target[:1]
            if op.source in answers or (len(op.source) == 1 and not is_temporary(op.source))
        }
        return given == {target[1]} and any(
            op.source == target[:1] and op.target[0] in self.parameters
            for op in self.graph.ops[node + 1 :]
            if isinstance(op, Store)
        )

    def _is_cleared(self, target: Path) -> bool:
        """`seq.pages.append(page)`, and `seq.pages.clear()` on another way."""
        return any(
            isinstance(op, Call) and op.method == "clear" and op.receiver == target[:-1]
            for op in self.graph.ops
        )

    def _is_removed(self, target: Path, held: Held) -> bool:
        """`self.active.append(page)`, and `self.active.remove(page)` where the start fails."""
        return target[-1] == ANY_ITEM and any(
            isinstance(op, Call)
            and op.method in ("remove", "discard")
            and op.receiver == target[:-1]
            and any(path in held.places for path, _ in op.args)
            for op in self.graph.ops
        )


def _made_for_caller(site: int, acquisition: Acquisition) -> bool:
    """A list or tuple that the acquire returned with the lease in it: nobody else has that list. An object
    with the lease in one of its fields may well be known to others, unless it was made there."""
    inside = acquisition.places[0][1:]
    listed = acquisition.fresh or all(piece.startswith("[") for piece in inside)
    return site >= 0 and acquisition.handle is Handle.RESULT and listed
