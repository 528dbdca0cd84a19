"""The flow graph of one function: one operation a node, edges that say why they are taken."""

from dataclasses import dataclass, field

from auditor.ir.ops import Call, Capture, Edge, Move, Op, Path

NODE_LIMIT = 20_000
"""Past this a function is not followed (generated tables, copies of nested `finally` bodies)."""


class TooLarge(Exception):
    """The function has more than NODE_LIMIT operations."""


@dataclass(slots=True)
class Graph:
    """Node 0 is the entry. `fresh_roots` are locals that only ever hold objects made in this function;
    `objects` are parameters that are None where they are false;
    `rewrites` are fields that a call (by id of its operation) writes, as far as that was found out;
    `spoken` are the names that each operation speaks of, once somebody has asked."""

    ops: list[Op] = field(default_factory=list)
    successors: list[list[tuple[int, Edge]]] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    condition_names: dict[str, frozenset[str]] = field(default_factory=dict)
    fresh_roots: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    rewrites: dict[int, frozenset[str]] = field(default_factory=dict)
    spoken: list[frozenset[str] | None] = field(default_factory=list)
    _ranks: list[int] = field(default_factory=list)
    _captures: list[Capture] | None = None
    _polled: dict[Path, Path] | None = None

    def add(self, op: Op) -> int:
        if len(self.ops) >= NODE_LIMIT:
            raise TooLarge
        self.ops.append(op)
        self.successors.append([])
        return len(self.ops) - 1

    def connect(self, source: int, target: int, edge: Edge) -> None:
        pair = (target, edge)
        if pair not in self.successors[source]:
            self.successors[source].append(pair)

    def captures(self) -> list[Capture]:
        """The nested functions made here. Asked for once the graph is built."""
        if self._captures is None:
            self._captures = [op for op in self.ops if isinstance(op, Capture)]
        return self._captures

    def polled(self) -> dict[Path, Path]:
        """Names of nothing but answers of `process.poll()`, with the process that was asked."""
        if self._polled is None:
            self._polled = _polled(self.ops)
        return self._polled

    def ranks(self) -> list[int]:
        """Each node's place in reverse postorder: but for loops, a node comes after all that lead to it.

        Asked for once the graph is built; nodes that nothing leads to come first, which nobody sees."""
        if not self._ranks:
            self._ranks = [0] * len(self.ops)
            for place, node in enumerate(reversed(_postorder(self.successors))):
                self._ranks[node] = place
        return self._ranks


def _polled(ops: list[Op]) -> dict[Path, Path]:
    answers = {op.target: op.receiver for op in ops if isinstance(op, Call) and op.method in ("poll", "wait")}
    found: dict[Path, Path] = {}
    other: set[Path] = set()
    for op in ops if answers else ():
        if isinstance(op, Move) and len(op.target) == 1:
            process = answers.get(op.source)
            if process is not None and found.setdefault(op.target, process) == process:
                continue
            other.add(op.target)
    return {name: process for name, process in found.items() if name not in other}


def _postorder(successors: list[list[tuple[int, Edge]]]) -> list[int]:
    """Every node that the entry reaches, after the nodes that it leads to."""
    found: list[int] = []
    seen = {0}
    path = [(0, iter(successors[0]))]
    while path:
        node, rest = path[-1]
        following = next((target for target, _ in rest if target not in seen), None)
        if following is None:
            found.append(node)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(successors[following])))
    return found
