"""Tree attention for parallel decoding: draft branches share KV rows through a counted node table."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

ROOT = -1


@dataclass
class Node:
    row: int
    token: int
    parent: int
    refs: int = 1
    children: List[int] = field(default_factory=list)


class TableFull(RuntimeError):
    pass


class NodeTable:
    """Rows of a device-resident tree KV table; a row goes back when its last reference does."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows - 1, -1, -1))
        self.nodes: Dict[int, Node] = {}

    def alloc(self, token: int, parent: int) -> Node:
        if not self._free:
            raise TableFull(f"no row for token {token}")
        node = Node(self._free.pop(), token, parent)
        self.nodes[node.row] = node
        return node

    def alloc_or_none(self, token: int, parent: int) -> Optional[Node]:
        if not self._free:
            return None
        return self.alloc(token, parent)  # clean: returned to the caller

    def incref(self, node: Node) -> Node:
        node.refs += 1
        return node

    def decref(self, node: Node) -> None:
        node.refs -= 1
        if node.refs == 0:
            del self.nodes[node.row]
            self._free.append(node.row)


@dataclass
class Branch:
    path: List[Node] = field(default_factory=list)
    score: float = 0.0

    @property
    def tip(self) -> int:
        return self.path[-1].row if self.path else ROOT


class TreeBuilder:
    def __init__(self, table: NodeTable, width: int) -> None:
        self.table = table
        self.width = width
        self.branches: List[Branch] = []
        self._pinned_tip: Optional[Node] = None

    def seed(self, tokens: Sequence[int]) -> None:
        for t in tokens[: self.width]:
            self.branches.append(Branch([self.table.alloc(t, ROOT)]))  # clean: owned by the branch, dropped by _retire

    def _retire(self, branch: Branch) -> None:
        for node in reversed(branch.path):
            self.table.decref(node)
        branch.path.clear()

    def fork(self, branch: Branch, token: int) -> Branch:
        """A new branch that shares `branch`'s path and ends in `token`."""
        leaf = self.table.alloc(token, branch.tip)  # clean: owned by the new branch's path
        shared = [self.table.incref(n) for n in branch.path]  # clean: near miss, raised only after alloc can no longer fail
        return Branch(shared + [leaf], branch.score)

    def try_fork(self, branch: Branch, token: int) -> Optional[Branch]:
        shared = [self.table.incref(n) for n in branch.path]  # leak: no decref when no row is left for the leaf
        leaf = self.table.alloc_or_none(token, branch.tip)  # clean: owned by the new branch's path
        if leaf is None:
            return None
        return Branch(shared + [leaf], branch.score)

    def try_extend(self, branch: Branch, tokens: Sequence[int]) -> bool:
        grown: List[Node] = []
        for t in tokens:
            node = self.table.alloc_or_none(t, grown[-1].row if grown else branch.tip)  # clean: near miss, the rollback decrefs those already grown
            if node is None:
                for n in grown:
                    self.table.decref(n)
                return False
            grown.append(node)
        branch.path.extend(grown)
        return True

    def expand(self, candidates: Dict[int, Sequence[Tuple[int, float]]]) -> None:
        """One level of growth; the weaker half of the result is retired."""
        grown: List[Branch] = []
        for b in self.branches:
            for token, score in candidates.get(b.tip, ()):
                child = self.fork(b, token)  # clean: kept in grown, then in branches or retired
                child.score = b.score + score
                grown.append(child)
        for b in self.branches:
            self._retire(b)
        grown.sort(key=lambda b: b.score, reverse=True)
        self.branches = grown[: self.width]
        for b in grown[self.width :]:
            self._retire(b)

    def expand_greedy(self, candidates: Dict[int, Sequence[Tuple[int, float]]]) -> None:
        best: Optional[Branch] = None
        for b in self.branches:
            for token, score in candidates.get(b.tip, ()):
                child = self.fork(b, token)  # leak: a child that is beaten, or beats the old best, drops a branch unretired
                child.score = b.score + score
                if best is None or child.score > best.score:
                    best = child
        for b in self.branches:
            self._retire(b)
        self.branches = [best] if best is not None else []

    def pin_tip(self, node: Node) -> None:
        self._pinned_tip = self.table.incref(node)  # leak: an earlier pin is overwritten without decref

    def unpin_tip(self) -> None:
        if self._pinned_tip is not None:
            self.table.decref(self._pinned_tip)
            self._pinned_tip = None

    def accept(self, verified: Sequence[int]) -> List[int]:
        """Keep the branch whose tokens agree longest; retire all others."""
        best, best_len = None, -1
        for b in self.branches:
            n = 0
            for node, tok in zip(b.path, verified):
                if node.token != tok:
                    break
                n += 1
            if n > best_len:
                best, best_len = b, n
        for b in self.branches:
            if b is not best:
                self._retire(b)
        self.branches = [best] if best is not None else []
        return [n.token for n in best.path[:best_len]] if best is not None else []

    def reset(self) -> None:
        for b in self.branches:
            self._retire(b)
        self.branches.clear()
        self.unpin_tip()


class MaskBuilder:
    """Ancestor masks; holds rows steady while a kernel reads them."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table

    def ancestors(self, node: Node) -> Iterator[Node]:
        cur: Optional[Node] = node
        while cur is not None:
            held = self.table.incref(cur)  # clean: decref in the finally of the same turn
            try:
                yield held
            finally:
                self.table.decref(held)
            cur = self.table.nodes.get(cur.parent)

    def dense(self, branch: Branch, prune_below: int) -> List[List[int]]:
        rows: List[List[int]] = []
        for node in branch.path:
            self.table.incref(node)  # leak: pruned nodes continue without the decref
            if node.row < prune_below:
                continue
            rows.append([a.row for a in self.ancestors(node)])
            self.table.decref(node)
        return rows

    def packed(self, branch: Branch, skip_root: bool) -> List[int]:
        bits: List[int] = []
        for node in branch.path:
            if skip_root and node.parent == ROOT:
                continue
            self.table.incref(node)  # clean: near miss, the continue comes before it
            bits.append(sum(1 << a.row for a in self.ancestors(node)))
            self.table.decref(node)
        return bits

    def hold_all(self, branches: Iterable[Branch]) -> int:
        held: List[Node] = []
        for b in branches:
            for n in b.path:
                held.append(self.table.incref(n))  # clean: the loop below lets each go
        count = len({n.row for n in held})
        for n in held:
            self.table.decref(n)
        return count


def sample_tree(builder: TreeBuilder, rng: random.Random, rounds: int) -> int:
    dropped = 0
    for _ in range(rounds):
        base = builder.branches[0]
        child = builder.try_fork(base, rng.randrange(100))  # leak: a child under the threshold is counted and dropped
        if child is None:
            break
        if rng.random() < 0.5:
            dropped += 1
            continue
        builder.branches.append(child)
    return dropped


def speculative_probe(builder: TreeBuilder, tokens: Sequence[int]) -> int:
    """How many of `tokens` could be hung under the first branch."""
    fitted = 0
    for t in tokens:
        try:
            child = builder.fork(builder.branches[0], t)  # clean: retired straight away
        except TableFull:
            return fitted
        fitted += 1
        builder._retire(child)
    return fitted


def main() -> None:
    table = NodeTable(64)
    b = TreeBuilder(table, 3)
    b.seed([1, 2, 3])
    b.expand({n.row: [(5, 0.3), (6, 0.7)] for n in list(table.nodes.values())})
    m = MaskBuilder(table)
    print(m.packed(b.branches[0], True), m.hold_all(b.branches), b.try_extend(b.branches[0], [9, 9]))
    b.accept([1, 6])
    b.reset()
    print("rows held", len(table.nodes))
    b.seed([1])
    sample_tree(b, random.Random(0), 6)
    m.dense(b.branches[0], 1 << 20)
    b.pin_tip(b.branches[0].path[0])
    b.pin_tip(b.branches[0].path[0])
    b.expand_greedy({x.tip: [(1, 0.1), (2, 0.5)] for x in b.branches})
    b.reset()
    print("rows held", len(table.nodes))


if __name__ == "__main__":
    main()
