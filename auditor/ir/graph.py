"""The flow graph of one function: one operation a node, edges that say why they are taken."""

from dataclasses import dataclass, field

from auditor.ir.ops import Edge, Op

NODE_LIMIT = 20_000
"""Past this a function is not followed (generated tables, copies of nested `finally` bodies)."""


class TooLarge(Exception):
    """The function has more than NODE_LIMIT operations."""


@dataclass(slots=True)
class Graph:
    """Node 0 is the entry. `fresh_roots` are locals that only ever hold objects made in this function;
    `rewrites` are fields that a call (by id of its operation) writes, as far as that was found out."""

    ops: list[Op] = field(default_factory=list)
    successors: list[list[tuple[int, Edge]]] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    condition_names: dict[str, frozenset[str]] = field(default_factory=dict)
    fresh_roots: frozenset[str] = frozenset()
    rewrites: dict[int, frozenset[str]] = field(default_factory=dict)
    _ranks: list[int] = field(default_factory=list)

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

    def ranks(self) -> list[int]:
        """Each node's place in reverse postorder: but for loops, a node comes after all that lead to it.

        Asked for once the graph is built; nodes that nothing leads to come first, which nobody sees."""
        if not self._ranks:
            self._ranks = [0] * len(self.ops)
            for place, node in enumerate(reversed(_postorder(self.successors))):
                self._ranks[node] = place
        return self._ranks


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
