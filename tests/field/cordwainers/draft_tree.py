"""Speculative decoding: nodes of the draft tree live in an arena of KV rows."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field


class NodeArena:
    """`new_node` takes a KV row, `drop_node` returns it; `rewind` returns all rows since a mark."""

    def __init__(self, n: int) -> None:
        self._free = list(range(n))
        self._order: list[int] = []

    def new_node(self) -> int:
        row = self._free.pop()
        self._order.append(row)
        return row

    def drop_node(self, row: int) -> None:
        self._order.remove(row)
        self._free.append(row)

    def mark(self) -> int:
        return len(self._order)

    def rewind(self, mark: int) -> int:
        tail = self._order[mark:]
        del self._order[mark:]
        self._free.extend(tail)
        return len(tail)


@dataclass(order=True)
class Node:
    cost: float
    token: int = field(compare=False)
    row: int = field(compare=False)
    depth: int = field(compare=False, default=0)


class DraftModel:
    """Toy n-gram model: follow-up tokens with costs."""

    def __init__(self, table: dict[int, list[tuple[int, float]]]) -> None:
        self.table = table

    def follow(self, token: int, width: int) -> list[tuple[int, float]]:
        return self.table.get(token, [])[:width]


class Drafter:
    def __init__(self, arena: NodeArena, model: DraftModel, beam: int) -> None:
        self.arena = arena
        self.model = model
        self.beam = beam
        self.roots: dict[int, int] = {}

    def child(self, parent: Node, token: int, cost: float) -> Node:
        row = self.arena.new_node()  # clean: in the node, handed to the caller
        return Node(parent.cost + cost, token, row, parent.depth + 1)

    def root_row(self, seq: int) -> int:
        row = self.roots.get(seq)
        if row is None:
            row = self.roots[seq] = self.arena.new_node()  # clean: near miss, end drops it
        return row

    def root_row_fast(self, seq: int) -> int:
        return self.roots.setdefault(seq, self.arena.new_node())  # leak: a known sequence drops the row

    def end(self, seq: int) -> None:
        row = self.roots.pop(seq, None)
        if row is not None:
            self.arena.drop_node(row)

    def widen(self, frontier: list[Node]) -> list[Node]:
        """Next level of the tree: the best `beam` children."""
        level: list[Node] = []
        for parent in frontier:
            for token, cost in self.model.follow(parent.token, self.beam):
                level.append(self.child(parent, token, cost))  # leak: nodes cut off by the slice are lost
        level.sort()
        return level[: self.beam]

    def widen_tidy(self, frontier: list[Node]) -> list[Node]:
        level: list[Node] = []
        for parent in frontier:
            for token, cost in self.model.follow(parent.token, self.beam):
                heapq.heappush(level, self.child(parent, token, cost))  # clean: near miss, rest dropped
        best = [heapq.heappop(level) for _ in range(min(self.beam, len(level)))]
        for node in level:
            self.arena.drop_node(node.row)
        return best

    def greedy(self, token: int, depth: int) -> list[int]:
        """Tokens of the cheapest path, tree rows are only needed meanwhile."""
        mark = self.arena.mark()
        node = Node(0.0, token, self.arena.new_node())  # clean: near miss, rewound below
        path: list[int] = []
        while node.depth < depth:
            nxt = self.model.follow(node.token, 1)
            if not nxt:
                break
            node = self.child(node, *nxt[0])  # clean: near miss, rebound, but rewind takes it
            path.append(node.token)
        self.arena.rewind(mark)
        return path

    def greedy_until(self, token: int, stop: int, depth: int) -> list[int]:
        mark = self.arena.mark()
        node = Node(0.0, token, self.arena.new_node())  # leak: the stop token returns before the rewind
        path: list[int] = []
        while node.depth < depth:
            nxt = self.model.follow(node.token, 1)
            if not nxt:
                break
            node = self.child(node, *nxt[0])  # leak: the stop token returns before the rewind
            if node.token == stop:
                return path
            path.append(node.token)
        self.arena.rewind(mark)
        return path

    def expand_one(self, parent: Node) -> tuple[Node | None, float]:
        options = self.model.follow(parent.token, 1)
        if not options:
            return None, 0.0
        node = self.child(parent, *options[0])  # clean: first of the pair, handed to the caller
        return node, node.cost - parent.cost

    def gain(self, parent: Node) -> float:
        _, delta = self.expand_one(parent)  # leak: the node is thrown away, only its cost is used
        return -delta

    def step_cost(self, parent: Node) -> float:
        node, delta = self.expand_one(parent)  # clean: dropped when there is one
        if node is not None:
            self.arena.drop_node(node.row)
        return delta

    def verify(self, nodes: list[Node], accepted: list[int]) -> int:
        """Drops the part of the chain after the first rejected token."""
        n = 0
        for node, token in zip(nodes, accepted):
            if node.token != token:
                break
            n += 1
        for node in nodes[n:]:
            self.arena.drop_node(node.row)
        del nodes[n:]
        return n


def draft_chain(d: Drafter, root: Node, depth: int, accepted: list[int]) -> list[int]:
    chain: list[Node] = []
    at = root
    for _ in range(depth):
        node, delta = d.expand_one(at)  # clean: near miss, verify drops the rejected, the loop the rest
        if node is None:
            break
        chain.append(node)
        at = node
    d.verify(chain, accepted)
    tokens = [n.token for n in chain]
    for n in chain:
        d.arena.drop_node(n.row)
    return tokens


def tree_size(d: Drafter, root: Node, depth: int) -> int:
    frontier, total = [root], 0
    for _ in range(depth):
        frontier = d.widen_tidy(frontier)  # leak: each level replaces the one before, no row is dropped
        total += len(frontier)
    return total
