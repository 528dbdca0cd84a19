"""Every name that surely means one object: what the analysis of misuse follows.

Leaks ask where a lease may still be held, so that in doubt they are silent; misuse asks what surely is the
lease, for the same reason. A place is dropped as soon as it might mean something else: an item under a
computed index, a field that a call may have written."""

from dataclasses import dataclass, replace
from typing import TypeVar

from auditor.flow.effects import Fate, Position, Treatment, Value
from auditor.flow.misuse import Uses
from auditor.flow.operands import operands
from auditor.flow.places import METADATA, VIEWS
from auditor.ir.graph import Graph
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    Assume,
    Await,
    Call,
    Constant,
    Delete,
    Edge,
    EndStatement,
    Enter,
    Fresh,
    Make,
    Move,
    Next,
    Op,
    Path,
    Store,
    Unpack,
    Yield,
    is_temporary,
)

Alias = tuple[Path, bool]
"""A place, and whether it holds a view instead of the object itself."""

MOST_ALIASES = 16
MEMORY = frozenset({".buf", ".buffer", ".tensor", ".raw_data", ".array"})
"""Fields of objects that stand for their memory."""
OVER_A_BUFFER = frozenset(
    {"numpy.frombuffer", "torch.frombuffer", "numpy.ndarray", "numpy.asarray", "memoryview"}
)
LENT_BY_METHOD = frozenset({"get_tensor", "getbuffer", "get_buffer", "as_tensor"})
"""Methods whose result lives in the memory of the object."""


@dataclass(frozen=True, slots=True)
class Named:
    """One object as it is named. `seen` are loops that have come upon it."""

    aliases: frozenset[Alias]
    seen: frozenset[int] = frozenset()
    slice: str = ""  # of the list that has it: what a loop over a part of it came upon
    doubled: frozenset[Path] = frozenset()  # lists that it was put into twice

    @property
    def places(self) -> frozenset[Path]:
        return frozenset(path for path, _ in self.aliases)


N = TypeVar("N", bound=Named)


def inside(named: frozenset[Alias], operand: Path, value: Value) -> Alias | None:
    """Where in `operand` the object surely lies, and whether as a view; None where it is not, or not
    surely."""
    for path, view in sorted(named):
        shared = min(len(path), len(operand))
        if path[:shared] != operand[:shared]:
            continue
        if len(operand) <= len(path):
            if ANY_ITEM not in operand and "[:]" not in operand:
                return path[len(operand) :], view
        elif _is_view(operand[len(path) :], value, view):
            return (), True
    return None


def _is_view(rest: Path, value: Value, view: bool) -> bool:
    """Whether what stands behind the object's place means its memory, or some of its numbers."""
    if value is Value.INDEX:
        return all(piece.startswith("[") for piece in rest)
    if value is Value.TENSOR or view:
        return is_piece(rest)
    return value is Value.OBJECT and rest[0] in MEMORY


def is_piece(rest: Path) -> bool:
    """Whether what stands behind a tensor's place means a view of it."""
    return rest[0] not in METADATA and all(piece.startswith("[") or piece in VIEWS for piece in rest)


class Aliases:
    """How operations move one object's names in one function."""

    def __init__(self, graph: Graph, effects: Uses, value: Value, protocol: str) -> None:
        self.graph = graph
        self.effects = effects
        self.value = value
        self.protocol = protocol

    def after(self, node: int, op: Op, named: N, edge: Edge) -> N | None:
        """The names after the operation; None on a branch that the object's being there excludes."""
        if edge in RAISING:
            return named
        match op:
            case Assume():
                return None if self._excluded(op, named) else named
            case Move(target=target, source=source):
                named = self.bound(named, target, [((), source)])
                known = source in named.doubled and target != source
                return replace(named, doubled=named.doubled | {target}) if known else named
            case Await(target=target, source=source):
                return self.bound(_without_fields(named), target, [((), source)])
            case Yield(target=target):
                return self.bound(_without_fields(named), target, [])
            case Enter(target=target, context=context):
                return self.bound(named, target, [((), context)])
            case Make(target=target, items=items):
                return self.bound(named, target, [((component,), path) for component, path in items])
            case Unpack(targets=targets, source=source):
                return self._unpacked(named, targets, source)
            case Constant(target=target) | Fresh(target=target):
                return self.bound(named, target, [])
            case Store():
                return self._stored(named, op)
            case Next():
                return self._next(node, op, named, edge)
            case Delete(target=target):
                if target[-1].startswith("["):
                    named = self._without_items(named, target[:-1])
                return self.bound(named, target, [])
            case EndStatement():
                return replace(named, aliases=frozenset(a for a in named.aliases if not is_temporary(a[0])))
            case Call():
                return self._called(op, named)
        return named

    def bound(self, named: N, target: Path, sources: list[tuple[Path, Path]]) -> N:
        """`target` means something new: at each component what its source holds, if that is the object."""
        if len(sources) == 1 and sources[0] == ((), target):
            return named
        gained = {
            ((*target, *component, *found[0]), found[1])
            for component, source in sources
            if (found := inside(named.aliases, source, self.value)) is not None
        }
        kept = {alias for alias in named.aliases if alias[0][: len(target)] != target}
        return _limited(replace(named, aliases=frozenset(kept | gained)))

    def added(self, named: N, place: Path, view: bool) -> N:
        return _limited(replace(named, aliases=named.aliases | {(place, view)}))

    def _excluded(self, op: Assume, named: Named) -> bool:
        """What is here is neither None nor false."""
        if op.subject is None or not op.says_absent or op.asks_the_sort:
            return False
        return any(
            path == op.subject or (path[: len(op.subject)] == op.subject and path[len(op.subject)][0] == "[")
            for path, _ in named.aliases
        )

    def _unpacked(self, named: N, targets: tuple[tuple[str, Path], ...], source: Path) -> N:
        gained = [
            (target, inside(named.aliases, (*source, component), self.value))
            for component, target in targets
            if component != ANY_ITEM
        ]
        for _, target in targets:
            named = self.bound(named, target, [])
        for target, found in gained:
            if found is not None:
                named = self.added(named, (*target, *found[0]), found[1])
        return named

    def _stored(self, named: N, op: Store) -> N:
        if op.sliced and self.value is Value.TENSOR:
            return named
        found = inside(named.aliases, op.source, self.value)
        if op.target[-1] == ANY_ITEM:
            named = self._without_items(named, op.target[:-1])
        elif op.target[-1] != "[:]":
            named = self.bound(named, op.target, [])
        return self.added(named, (*op.target, *found[0]), found[1]) if found is not None else named

    def _without_items(self, named: N, container: Path) -> N:
        """One of its items is another now, and nobody can tell which."""
        return replace(named, aliases=frozenset(a for a in named.aliases if not _an_item(a[0], container)))

    def _next(self, node: int, op: Next, named: N, edge: Edge) -> N | None:
        """One turn of the loop meets the object, and no other does; a loop that never met it had none."""
        container = op.source[:-1] if op.part and self.value is Value.OBJECT else op.source
        held = [a for a in sorted(named.aliases) if _an_item(a[0], container)]
        if container != op.source and op.part != (named.slice or op.part):
            held = []  # it is in another part of the list
        if edge is Edge.EXHAUSTED:
            if held and node not in named.seen:
                return None
            return replace(named, seen=named.seen - {node})
        after = self.bound(named, op.target, [])
        if not held:
            return after
        if node in named.seen:
            if container not in named.doubled:
                return after
            after = replace(after, doubled=frozenset())
        path, view = held[0]
        after = replace(after, seen=after.seen | {node}, slice=op.part or after.slice)
        return self.added(after, (*op.target, *path[len(container) + 1 :]), view)

    # Calls --------------------------------------------------------------------------------------------------

    def _called(self, call: Call, named: N) -> N:
        after = self.bound(named, call.target, [])
        for position, operand in operands(call):
            found = inside(named.aliases, operand, self.value)
            if found is None:
                continue
            if self._looks_into(call, position, found):
                after = self.added(after, call.target, True)
                continue
            treatment = self.treatment(call, position, found[0], found[1])
            if treatment.fate is not Fate.BORROW:
                continue
            if treatment.result is not None and not treatment.maybe:
                view = found[1] or (self.value is Value.TENSOR and not call.method.endswith("_"))
                after = self.added(after, call.target + treatment.result, view)
            if treatment.moved_to is not None:
                if self._is_put_again(call, treatment.moved_to, found, named):
                    after = replace(after, doubled=after.doubled | {treatment.moved_to[:-1]})
                after = self.added(after, treatment.moved_to, found[1])
            if treatment.leaves:
                gone = (*operand, *found[0])
                after = replace(after, aliases=frozenset(a for a in after.aliases if a[0] != gone))
            if any(piece.startswith(".") for piece in found[0]) and self.effects.may_write(
                call, position, found[0]
            ):
                after = self.bound(after, (*operand, *found[0]), [])
        return after

    def _is_put_again(self, call: Call, place: Path, found: Alias, named: Named) -> bool:
        """`table.append(block)` where the table has it: unless that is asked, or the other is a view."""
        if call.method not in ("append", "appendleft", "insert") or found != ((), False):
            return False
        return (place, False) in named.aliases and not any(
            isinstance(op, Assume) and " in " in op.key and place[0] in op.names for op in self.graph.ops
        )

    def _looks_into(self, call: Call, position: Position, found: Alias) -> bool:
        """`np.frombuffer(mapped)`: an array over the memory of an object."""
        if self.value is not Value.OBJECT or found[0]:
            return False
        if position == -1:
            return call.method in LENT_BY_METHOD and not found[1]
        return position in (0, "buffer") and (self.effects.dotted(call) or call.method) in OVER_A_BUFFER

    def treatment(self, call: Call, position: Position, rest: Path, view: bool = False) -> Treatment:
        """A view of an object's memory is a tensor or an array, whatever the object is."""
        value = Value.TENSOR if view and not rest and self.value is not Value.INDEX else self.value
        return self.effects.treatment(call, position, rest, value, self.protocol)


def _an_item(path: Path, container: Path) -> bool:
    return (
        path[: len(container)] == container
        and path[len(container) : len(container) + 1] != ()
        and (path[len(container)].startswith("["))
    )


def _without_fields(named: N) -> N:
    """While this function waits, others may give an object's fields something else."""
    kept = (a for a in named.aliases if not any(piece.startswith(".") for piece in a[0]))
    return replace(named, aliases=frozenset(kept))


def _limited(named: N) -> N:
    if len(named.aliases) <= MOST_ALIASES:
        return named
    return replace(
        named, aliases=frozenset(sorted(named.aliases, key=lambda a: (len(a[0]), a))[:MOST_ALIASES])
    )
