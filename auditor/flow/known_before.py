"""Objects made here that others know of before the lease gets into them: `blocks = self.tables[key] = []`,
and whatever is put into `blocks` from then on lies in the table."""

from collections.abc import Callable, Iterator

from auditor.flow.effects import Effects, Fate, Value
from auditor.flow.operands import operands
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Make, Move, Path, Store

SOMEWHERE: Path = ()
"""Others know it, and nobody can say by which path."""


class KnownBefore:
    """Asked by name and by node; nodes stand in the order of the lines, which is taken for that of time."""

    def __init__(self, graph: Graph, effects: Effects, protocol: str, outlives: Callable[[Path], bool]):
        self.graph = graph
        self.effects = effects
        self.protocol = protocol
        self.outlives = outlives
        self._places: dict[tuple[str, int], Path | None] = {}

    def place(self, name: str, node: int) -> Path | None:
        """Where others find, at this node, what the name means; None where it is known here alone."""
        if name not in self.graph.fresh_roots:
            return None
        if (name, node) not in self._places:
            self._places[name, node] = self._told_since_made(name, node)
        return self._places[name, node]

    def _told_since_made(self, name: str, node: int) -> Path | None:
        names = self._other_names(name)
        holders = names | set(self._holders(names))
        for op in reversed(self.graph.ops[: max(node, 0)]):
            match op:
                case Store(target=place, source=(stored,)) if stored in holders and self.outlives(place):
                    return place if stored in names else SOMEWHERE
                case Call() if (given := self._given(op, holders)) is not None:
                    return given
            target: Path = getattr(op, "target", ())
            if not isinstance(op, Move) and len(target) == 1 and target[0] in names:
                return None
        return None

    def _other_names(self, name: str) -> set[str]:
        names, before = {name}, 0
        while len(names) > before:
            before = len(names)
            for op in self.graph.ops:
                match op:
                    case Move(target=(one,), source=(other,)) if one in names or other in names:
                        names |= {one, other}
        return names

    def _holders(self, names: set[str]) -> Iterator[str]:
        """What is made around it: `Request(key, blocks)`, `(key, blocks)`."""
        for op in self.graph.ops:
            match op:
                case Make(target=(holder,), items=items) if any(path[0] in names for _, path in items):
                    yield holder
                case Call(target=(holder,), method=method) if method.lstrip("_")[:1].isupper():
                    if any(path[0] in names for _, path in operands(op)[1:]):
                        yield holder

    def _given(self, call: Call, names: set[str]) -> Path | None:
        """Where the call leaves it for good."""
        for position, operand in operands(call):
            if len(operand) > 1 or operand[0] not in names or position == -1:
                continue
            treatment = self.effects.treatment(call, position, (), Value.OBJECT, self.protocol)
            if treatment.moved_to is not None and self.outlives(treatment.moved_to):
                return treatment.moved_to
            if treatment.fate in (Fate.TAKE, Fate.UNKNOWN):
                return SOMEWHERE
        return None
