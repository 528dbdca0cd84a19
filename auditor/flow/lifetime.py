"""A lease after its release: released again, used, returned as a view, given to another pool.

It is followed from its acquire (or from the entry of a function that is given it) by its sure names; the
state says whether it has been released."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from auditor.flow.aliases import Aliases, Named, inside
from auditor.flow.effects import Position, Value
from auditor.flow.misuse import Fault, Release, Uses
from auditor.flow.operands import operands
from auditor.flow.places import escaped
from auditor.flow.spelling import spelt
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    RAISING,
    RESULT,
    Call,
    Delete,
    Edge,
    Enter,
    Exit,
    Fresh,
    InPlace,
    Leave,
    Next,
    Op,
    Path,
    Store,
    Way,
    Yield,
)

EXPECTING_FAILURE = frozenset(
    {"raises", "assertRaises", "assertRaisesRegex", "suppress", "assertWarns", "warns"}
)
HELD_AGAIN = frozenset(
    {"retain", "incref", "inc_ref", "ref_count_up", "add_ref", "addref", "touch", "share", "pin", "ref",
     "increment_ref", "increase_ref", "fork", "inc_lock_ref"}
)  # fmt: skip
"""Methods after which one more release is owed."""

SHRINKING = frozenset({"pop", "popleft", "clear", "remove", "resize_", "truncate"})
"""Methods after which a list of numbers has others in it."""


@dataclass(frozen=True, slots=True)
class Life(Named):
    """`released` is the node of the first release, -1 before it; `parted` that of some of the numbers."""

    released: int = -1
    parted: int = -1
    closed: bool = False  # by whom it had been handed to
    tolerant: bool = False
    pool: Path | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A fault at a node, with the state from which it happened."""

    fault: Fault
    node: int
    state: Life


class Lifetime:
    """The step function of one lease over its whole life. `foreign`: it is no lease at all.

    `exits` is the context whose end gives it back, where a `with` does. A path ends at its first fault, or
    goes on where all ways out are asked for. `reused`: it was handed over, to be closed at the end of
    `exits`; what is closed may be somebody else's at once, so that a suppressed error helps nobody."""

    def __init__(
        self,
        graph: Graph,
        uses: Uses,
        value: Value,
        protocol: str,
        *,
        foreign: bool = False,
        going_on: bool = False,
        exits: Path | None = None,
        reused: bool = False,
    ) -> None:
        self.graph = graph
        self.uses = uses
        self.value = value
        self.protocol = protocol
        self.foreign = foreign
        self.going_on = going_on
        self.exits = exits
        self.reused = reused
        self.aliases = Aliases(graph, uses, value, protocol)
        self.parameters = frozenset(graph.parameters)
        self.events: list[Event] = []
        self.left: list[Life] = []  # states on ordinary ways out
        self.releases: dict[int, Release] = {}

    def step(self, node: int, life: Life, edge: Edge) -> tuple[Life, ...]:
        op = self.graph.ops[node]
        after = self._after(node, op, life, edge)
        if after is None or (not after.aliases and after.released < 0):
            return ()
        return (after,)

    def _after(self, node: int, op: Op, life: Life, edge: Edge) -> Life | None:
        if isinstance(op, Leave):
            self._leave(node, op, life)
            return None
        if isinstance(op, Enter) and not self.reused and _expects_failure(op.at):
            return None
        if isinstance(op, Enter) and op.context == self.exits and not self.reused:
            return None  # of a loop: what is entered now is another
        if isinstance(op, Exit) and op.context == self.exits:
            return replace(life, closed=True) if self.reused else self._released(node, life, Release())
        if isinstance(op, Call):
            given = self._given_back(op, life)
            if given is not None:
                return None if edge in RAISING else self._released(node, *given)
            if edge in RAISING and life.released >= 0 and self.uses.only_releases(op):
                return None  # releases are not expected to fail
            if op.method in HELD_AGAIN and self._touches(op, life):
                return None
        if self.value is Value.INDEX and self._fewer(op, life):
            return None
        if life.released >= 0 and edge not in RAISING and (life.closed or not self.reused):
            fault = self._fault(op, life)
            if fault is not None:
                self._report(fault, node, life)
                if not self.going_on:
                    return None
        return self.aliases.after(node, op, life, edge)

    def _report(self, fault: Fault, node: int, life: Life) -> None:
        event = Event(fault, node, life)
        if event not in self.events:
            self.events.append(event)

    # Releases -----------------------------------------------------------------------------------------------

    def _given_back(self, call: Call, life: Life) -> tuple[Life, Release, bool] | None:
        """The release, and whether it takes some of several numbers only."""
        for position, operand in operands(call):
            found = inside(life.aliases, operand, self.value)
            if found is None:
                continue
            release = self.uses.release(call, position, found[0], self.value, self.protocol)
            if release is None or (found[1] and self.value is Value.OBJECT):
                continue
            if found[1] and self.value is Value.INDEX:
                return life, release, True
            if not release.kept:
                place = (*operand, *found[0])
                life = replace(life, aliases=frozenset(a for a in life.aliases if a[0] != place))
            return life, release, False
        if call.receiver is None:
            for place in sorted(life.places):
                release = self.uses.released_within(call, place, self.value)
                if release is not None:
                    return life, release, False
        return None

    def _released(self, node: int, life: Life, release: Release, part: bool = False) -> Life | None:
        self.releases[node] = release
        if self.foreign:
            if release.checked:
                self._report(Fault.FOREIGN, node, life)
            return None
        if life.released < 0 <= life.parted and not part:
            life = replace(life, released=life.parted)
        if life.released >= 0:
            if not (life.tolerant or release.tolerant) and self._same_pool(life.pool, release.pool):
                self._report(Fault.TWICE, node, life)
            return None
        life = replace(life, tolerant=release.tolerant, pool=self.spelt(release.pool))
        return replace(life, parted=node) if part else replace(life, released=node)

    def _fewer(self, op: Op, life: Life) -> bool:
        """After `blocks.pop()` nobody can tell which of the numbers given back are still among them."""
        if life.released < 0 and life.parted < 0:
            return False
        match op:
            case Call(receiver=receiver, method=method):
                return method in SHRINKING and (receiver, False) in life.aliases
            case Store(target=target) | Delete(target=target):
                return target[-1].startswith("[") and (target[:-1], False) in life.aliases
        return False

    def _same_pool(self, one: Path | None, other: Path | None) -> bool:
        """Numbers may be of several pools at once; an object comes back to one."""
        if one is None or other is None:
            return self.value is not Value.INDEX
        return one == self.spelt(other)

    def spelt(self, path: Path | None) -> Path | None:
        return spelt(self.graph, path) if path is not None else None

    def _touches(self, call: Call, life: Life) -> bool:
        return any(inside(life.aliases, operand, self.value) is not None for _, operand in operands(call))

    # Uses ---------------------------------------------------------------------------------------------------

    def _fault(self, op: Op, life: Life) -> Fault | None:
        match op:
            case Call():
                if any(True for _ in self._used_by(op, life)):
                    return Fault.USED
                return Fault.ESCAPED if self._kept_by(op, life) else None
            case Yield(source=source) if source is not None:
                return self._handed_on(source, life)
            case Store(target=target, source=source):
                return self._stored(op, target, source, life)
        match op:
            case Fresh(at=ast.BinOp() | ast.UnaryOp(), uses=uses) if any(self._whole(p, life) for p in uses):
                return Fault.USED
            case InPlace(target=target, operand=operand) if self._whole(target, life) or self._whole(
                operand, life
            ):
                return Fault.USED
            case Next(source=source) if self._whole(source, life):
                return Fault.USED
        return None

    def _whole(self, operand: Path, life: Life) -> bool:
        """Whether the operand is memory: a tensor's lease, or a view of one; not a container."""
        found = inside(life.aliases, operand, self.value)
        if found is None or found[0] != () or self.value is Value.INDEX:
            return False
        return self.value is Value.TENSOR or found[1]

    def _used_by(self, call: Call, life: Life) -> Iterator[Position]:
        for position, operand in operands(call):
            found = inside(life.aliases, operand, self.value)
            if found is None:
                continue
            value = Value.TENSOR if found[1] and self.value is not Value.INDEX else self.value
            if self.uses.uses(call, position, found[0], value, self.protocol):
                yield position

    def _kept_by(self, call: Call, life: Life) -> bool:
        """`self.history.append(view)`."""
        for position, operand in operands(call):
            found = inside(life.aliases, operand, self.value)
            if found is None or not found[1] or self.value is Value.INDEX:
                continue
            moved = self.aliases.treatment(call, position, found[0]).moved_to
            if moved is not None and escaped(moved, self.parameters, self.graph.fresh_roots):
                return True
        return False

    def _handed_on(self, source: Path, life: Life) -> Fault | None:
        found = inside(life.aliases, source, self.value)
        if found is None or self.value is Value.INDEX or not (self.value is Value.TENSOR or found[1]):
            return None
        return Fault.ESCAPED if found[1] else Fault.USED

    def _stored(self, op: Store, target: Path, source: Path, life: Life) -> Fault | None:
        if self.value is Value.INDEX:
            return None
        written = target[:-1]
        if target[-1].startswith("[") and written and self._whole(written, life):
            return Fault.USED
        found = inside(life.aliases, source, self.value)
        if found is None:
            return None
        if op.sliced:
            return Fault.USED if self._whole(source, life) else None
        outside = escaped(target, self.parameters, self.graph.fresh_roots)
        return Fault.ESCAPED if outside and found[1] else None

    # Leaving ------------------------------------------------------------------------------------------------

    def _leave(self, node: int, op: Leave, life: Life) -> None:
        if op.way is Way.RAISE:
            return
        self.left.append(life)
        if life.released < 0 or self.value is Value.INDEX:
            return
        fault = self._handed_on(RESULT, life) if op.way is Way.RETURN else None
        if fault is None and any(
            view and len(path) > 1 and escaped(path, self.parameters, self.graph.fresh_roots)
            for path, view in life.aliases
        ):
            fault = Fault.ESCAPED
        if fault is not None:
            self._report(fault, node, life)


def _expects_failure(at: ast.AST) -> bool:
    if not isinstance(at, ast.Call):
        return False
    name = at.func.attr if isinstance(at.func, ast.Attribute) else getattr(at.func, "id", "")
    return name in EXPECTING_FAILURE
