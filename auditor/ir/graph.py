"""The flow graph of one function: one operation a node, edges that say why they are taken."""

from dataclasses import dataclass, field

from auditor.ir.ops import Edge, Op

NODE_LIMIT = 20_000
"""Past this a function is not followed (generated tables, copies of nested `finally` bodies)."""


class TooLarge(Exception):
    """The function has more than NODE_LIMIT operations."""


@dataclass(slots=True)
class Graph:
    """Node 0 is the entry. `fresh_roots` are locals that only ever hold objects made in this function."""

    ops: list[Op] = field(default_factory=list)
    successors: list[list[tuple[int, Edge]]] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    condition_names: dict[str, frozenset[str]] = field(default_factory=dict)
    fresh_roots: frozenset[str] = frozenset()

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
