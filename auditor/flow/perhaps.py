"""What may be the lease, or lead to it, as an operand of calls."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from auditor.flow.amounts import Amounts
from auditor.flow.effects import Fate, Handle, Position, Treatment, Value
from auditor.flow.held import Held
from auditor.flow.indirect import AT, WITHIN, lies_within
from auditor.flow.operands import operands
from auditor.flow.places import below
from auditor.flow.sums import sums
from auditor.ir.ops import ANY_ITEM, Await, Call, Lookup, Move, Path, Unpack, is_temporary

MAKING = re.compile(r"_*(?:make|build|create|wrap|new|view|handle|as|to|from|open|get|bind)(?:_|$)")
"""Functions whose result stands for what they are given."""

COPYING_OUT = frozenset({"copy", "clone", "tolist", "tobytes", "item"})
"""Methods of memory whose result shares none with it."""


OF_TENSORS = re.compile(
    r"[a-z]\w*[a-z0-9]_|view|reshape|narrow|flatten|squeeze|unsqueeze|to|cpu|cuda|float|half|numpy"
)
"""Methods of tensors whose result is a tensor: `zero_`, `copy_`, a view, another type. None ends anything."""


class Perhaps(Amounts):
    """Places of which nobody can tell whether the lease is there."""

    def kept_outside(self, held: Held) -> bool:
        """Whether an object that outlives the function has it."""
        return any(map(self._outlives, held.places))

    @cached_property
    def _ended_by_key(self) -> frozenset[int]:
        """`gateway.end_session(key)` after `row = gateway.open_session(key)`, `gate.end_update(None)` after
        `version = gate.begin_update()`."""
        ops, acquisition = self.graph.ops, self.acquisition
        begun = ops[self.site] if self.site >= 0 else None
        if not isinstance(begun, Call) or acquisition.handle is not Handle.RESULT:
            return frozenset()
        later = (
            (node, op)
            for node, op in enumerate(ops)
            if isinstance(op, Call) and op.receiver == begun.receiver is not None
        )
        ends = self.effects.ends_what_was_asked
        return frozenset(
            node for node, op in later if node != self.site and ends(op, begun, acquisition.protocol)
        )

    def _ends_or_moves(self, treatment: Treatment) -> bool:
        """Somebody else may have it then: also an object made around it (`memoryview(x)` is none), whose
        methods may end it."""
        made_around = treatment.result == (ANY_ITEM,) and not treatment.maybe
        return treatment.fate is not Fate.BORROW or treatment.moved_to is not None or made_around

    def _lent_perhaps(self, node: int, operand: Path, held: Held, perhaps: list[Treatment]) -> bool:
        """A trusted call has what another one made of the lease no longer than the lease; of a piece of the
        lease that is not sure: `pool.detach(lease.connection)` may be its end. What was built by a locked key
        others may keep: it is no key."""
        by_key = self.acquisition.keyed and self.acquisition.handle is Handle.ARGUMENT
        allowed = {Fate.UNKNOWN, Fate.TAKE} if by_key else {Fate.UNKNOWN}
        if node not in self.trusted or any(treatment.fate not in allowed for treatment in perhaps):
            return False
        given = (place[0] for place in held.maybe if below(place, operand) is not None)
        return self._made_by_trusted.issuperset(given)

    @cached_property
    def _made_by_trusted(self) -> frozenset[str]:
        """Names of what the trusted calls return, and methods of objects: `kernel.run(piece.view(dtype))`;
        and of lists that are put together on the way into them, `model.verify(draft, blocks + scratch)`."""
        calls = ((node, op) for node, op in enumerate(self.graph.ops) if isinstance(op, Call))
        names = {
            op.target[0]
            for node, op in calls
            if node != self.site
            and (node in self.trusted or len(op.receiver or ()) == 1 or OF_TENSORS.fullmatch(op.method))
        }
        names |= {place[0] for place in sums(self.graph.ops) if is_temporary(place)}
        for op in self.graph.ops:
            if isinstance(op, Move | Await) and op.source[:1] == op.source and op.source[0] in names:
                names.add(op.target[0])
        return frozenset(names)

    @cached_property
    def _released_slices(self) -> frozenset[Path]:
        """`view = shared.buf[:size]`, and `view.release()` when it was read: that is the end of the view, and
        nobody whom it was shown has kept it, or it could not be released."""
        calls = (op for op in self.graph.ops if isinstance(op, Call) and op.method == "release")
        released = {op.receiver for op in calls if len(operands(op)) == 1}
        slices: set[Path] = set()
        others: set[Path | None] = set()
        for op in self.graph.ops:
            match op:
                case Move(target=target, source=source) if _is_a_slice(source):
                    slices.add(target)
                case Unpack(targets=targets):
                    others.update(target for _, target in targets)
                case _:
                    others.add(getattr(op, "target", None))
        return frozenset(path for path in (slices & released) - others if len(path) == 1)

    def _perhaps_given(
        self, call: Call, position: Position, operand: Path, held: Held
    ) -> Iterator[Treatment]:
        """What happens to that which may be the lease, and has no other owner."""
        if any(self._outlives(place) for place in held.places):
            return
        for place in held.maybe:
            rest = below(place, operand)
            if rest is None or place in self._released_slices:
                continue
            if place[-1] == AT:
                if rest == (AT,) and not self._only_used(self._of_contents(call, position), operand):
                    yield Treatment(Fate.UNKNOWN)
                continue
            value, protocol = self.acquisition.value, self.acquisition.protocol
            inside = rest[:-1] if lies_within(place) else rest
            treatment = self.effects.treatment(call, position, inside, value, protocol)
            if treatment.fate is Fate.UNKNOWN and (lies_within(place) or place in self._fields_by_name):
                continue
            on = treatment.result in ((WITHIN,), (ANY_ITEM,))
            if place[-1] == WITHIN and (treatment.fate is Fate.RELEASE or on):
                continue  # `rmtree(join(folder, "part"))` leaves the folder
            if place[-1] == WITHIN and treatment.result is not None:
                treatment = replace(treatment, maybe=True)  # `copy(join(folder, "part"))` may say where it is
            yield treatment

    def _by_another_name(self, call: Call, position: Position, operand: Path, held: Held) -> bool:
        """`free(beam.address)`, where what is known is that the lease lies in `beam._meta.address`: of an
        object that was found in a list nobody can tell what its properties lead to."""
        root, acquisition = operand[0], self.acquisition
        found_there = root in self.own_roots - self.graph.fresh_roots
        if not found_there or len(operand) == 1 or self._inside(held, operand) is not None:
            return False
        treatment = self.effects.treatment(call, position, (), acquisition.value, acquisition.protocol)
        return treatment.fate is Fate.RELEASE and any(
            place[0] == root and len(place) > 2 for place in held.places
        )

    def _of_contents(self, call: Call, position: Position) -> Treatment:
        """What happens to the thing that lies in a table under the number, an object or a tensor."""
        for value in (Value.OBJECT, Value.TENSOR):
            treatment = self.effects.treatment(call, position, (), value, self.acquisition.protocol)
            if treatment.fate is not Fate.UNKNOWN:
                break
        return treatment

    def _only_used(self, treatment: Treatment, operand: Path) -> bool:
        """A function of which nothing is known works with a slot's memory; who keeps an object keeps its
        number, who keeps a tensor does not."""
        if operand in self._rows:
            return treatment.fate is not Fate.RELEASE
        return treatment.fate in (Fate.BORROW, Fate.UNKNOWN) and treatment.moved_to is None

    def _made_of_contents(self, call: Call, held: Held) -> bool:
        """A view of what lies under the number, or an object made around it; no copy, nor what a model, or
        whatever it is, makes of a tensor's rows."""
        return any(
            self._shows(self._of_contents(call, position), operand, position, call.method)
            or (MAKING.match(call.method) is not None and position != -1)
            for position, operand in operands(call)
            if (*operand, AT) in held.maybe
        )

    def _shows(self, treatment: Treatment, operand: Path, position: Position, method: str) -> bool:
        if position == -1 and method in COPYING_OUT:
            return False
        made = treatment.maybe and position != -1 and operand in self._rows
        return treatment.result is not None and not made

    @cached_property
    def _rows(self) -> frozenset[Path]:
        """What is looked up in tensors, or in a list of tensors: none says which one it is."""
        lookups = (op for op in self.graph.ops if isinstance(op, Lookup))
        return frozenset(op.target for op in lookups if self.effects.is_memory(op.at))

    def _leads_within(self, call: Call, held: Held) -> bool:
        """`join(join(folder, "part"), "log")` lies in the folder too, and `Archive(join(folder, "part"))` may
        say where it is."""
        if call.method != "join" and not call.method[:1].isupper():
            return False
        return any((*operand, WITHIN) in held.maybe for operand, _ in call.args)


def _is_a_slice(source: Path) -> bool:
    """Of what an object has, not of a list."""
    return source[-1] == "[:]" and any(piece.startswith(".") for piece in source[1:])
