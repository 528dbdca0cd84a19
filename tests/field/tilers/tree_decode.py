"""Tree decoding: beams share KV blocks copy-on-write through reference counts."""
from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

Table = List[int]


class BlockRefs:
    """Counts the tables that refer to each KV block."""

    def __init__(self, num_blocks: int) -> None:
        self.count = [0] * num_blocks
        self._free = list(range(num_blocks))

    def new_block(self) -> int:
        if not self._free:
            raise MemoryError("out of KV blocks")
        b = self._free.pop()
        self.count[b] = 1
        return b

    def share(self, block: int) -> int:
        self.count[block] += 1
        return block

    def unshare(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block] == 0:
            self._free.append(block)

    def fork(self, table: Table) -> Table:
        return [self.share(b) for b in table]  # clean: the new table holds the references, drop() gives them up

    def drop(self, table: Table) -> None:
        while table:
            self.unshare(table.pop())


@dataclass(order=True)
class TreeNode:
    score: float
    order: int
    table: Table = field(compare=False)
    tokens: Tuple[int, ...] = field(compare=False, default=())


class TreeDecoder:
    def __init__(self, refs: BlockRefs, width: int, margin: float = 4.0) -> None:
        self.refs = refs
        self.width = width
        self.margin = margin
        self._order = itertools.count()
        self.tables: Dict[int, Table] = {}

    def root(self, prompt_blocks: int) -> TreeNode:
        table = [self.refs.new_block() for _ in range(prompt_blocks)]  # clean: owned by the returned node
        return TreeNode(0.0, next(self._order), table)

    def ensure_writable(self, table: Table, i: int) -> None:
        old = table[i]
        if self.refs.count[old] > 1:
            fresh = self.refs.new_block()  # clean: near miss, replaces the shared block whose reference is given up
            table[i] = fresh
            self.refs.unshare(old)

    def append_block(self, node: TreeNode) -> None:
        node.table.append(self.refs.new_block())  # clean: owned by the node's table

    def expand(self, node: TreeNode, topk: Sequence[Tuple[int, float]]) -> List[TreeNode]:
        """Children of ``node``; consumes the node."""
        best = topk[0][1]
        out: List[TreeNode] = []
        for token, logp in topk:
            table = self.refs.fork(node.table)  # leak: candidates under the margin continue with a forked table
            if logp < best - self.margin:
                continue
            out.append(TreeNode(node.score + logp, next(self._order), table, node.tokens + (token,)))
        self.refs.drop(node.table)
        return out

    def expand_inplace(self, node: TreeNode, topk: Sequence[Tuple[int, float]]) -> List[TreeNode]:
        """The first child takes over the table of the parent."""
        out: List[TreeNode] = []
        for i, (token, logp) in enumerate(topk):
            table = node.table if i == 0 else self.refs.fork(node.table)  # clean: near miss, every fork goes into a child
            out.append(TreeNode(node.score + logp, next(self._order), table, node.tokens + (token,)))
        return out

    def prune(self, nodes: List[TreeNode]) -> List[TreeNode]:
        nodes.sort(reverse=True)
        for loser in nodes[self.width:]:
            self.refs.drop(loser.table)
        return nodes[: self.width]

    def keep_best(self, heap: List[TreeNode], node: TreeNode, token: int, logp: float) -> None:
        child = TreeNode(node.score + logp, next(self._order), self.refs.fork(node.table), node.tokens + (token,))  # leak: the node that heappushpop returns is ignored
        if len(heap) < self.width:
            heapq.heappush(heap, child)
        else:
            heapq.heappushpop(heap, child)

    def keep_best_strict(self, heap: List[TreeNode], node: TreeNode, token: int, logp: float) -> None:
        child = TreeNode(node.score + logp, next(self._order), self.refs.fork(node.table), node.tokens + (token,))  # clean: near miss, the node pushed out is dropped
        if len(heap) < self.width:
            heapq.heappush(heap, child)
            return
        evicted = heapq.heappushpop(heap, child)
        self.refs.drop(evicted.table)

    def candidates(self, node: TreeNode, tokens: Sequence[int]) -> Iterator[Tuple[int, Table]]:
        for t in tokens:
            yield t, self.refs.fork(node.table)  # clean: yielded, the consumer drops it

    def score_all(self, node: TreeNode, tokens: Sequence[int]) -> Dict[int, float]:
        scores: Dict[int, float] = {}
        for t, table in self.candidates(node, tokens):  # clean: each table dropped in the loop
            scores[t] = float(len(table)) / (1 + t)
            self.refs.drop(table)
        return scores

    def first_above(self, node: TreeNode, tokens: Sequence[int], threshold: float) -> Optional[int]:
        for t, table in self.candidates(node, tokens):  # leak: the accepted candidate returns without dropping its table
            if float(len(table)) / (1 + t) > threshold:
                return t
            self.refs.drop(table)
        return None

    def open_branches(self, node: TreeNode, ids: Sequence[int]) -> None:
        for branch in ids:
            if branch in self.tables:
                continue
            self.tables[branch] = self.refs.fork(node.table)  # clean: in the table, accept() takes one out and drops the others

    def accept(self, best: int) -> Table:
        winner = self.tables.pop(best)
        for table in self.tables.values():
            self.refs.drop(table)
        self.tables.clear()
        return winner


class LookaheadPool:
    """Branches per n-gram; a level is replaced as a whole."""

    def __init__(self, refs: BlockRefs) -> None:
        self.refs = refs
        self._levels: List[List[Table]] = []
        self._guess: Dict[Tuple[int, ...], Table] = {}

    def push_level(self, base: Table, n: int) -> None:
        self._levels.append([self.refs.fork(base) for _ in range(n)])  # leak: pop_level drops only the first table of a level

    def pop_level(self) -> int:
        if not self._levels:
            return 0
        level = self._levels.pop()
        self.refs.drop(level[0])
        return len(level)

    def remember(self, ngram: Tuple[int, ...], base: Table) -> None:
        old = self._guess.pop(ngram, None)
        if old:
            self.refs.drop(old)
        self._guess[ngram] = self.refs.fork(base)  # clean: near miss, the previous guess was dropped

    def forget_all(self) -> None:
        for table in self._guess.values():
            self.refs.drop(table)
        self._guess = {}


def verify_path(decoder: TreeDecoder, node: TreeNode, path: Sequence[int], target: Sequence[int]) -> int:
    table = decoder.refs.fork(node.table)  # leak: a rejected first token returns before the drop
    n = 0
    for a, b in zip(path, target):
        if a != b:
            break
        n += 1
    if n == 0:
        return 0
    decoder.refs.drop(table)
    return n


def decode(decoder: TreeDecoder, steps: int) -> Tuple[int, ...]:
    frontier = [decoder.root(2)]  # clean: consumed by expand, the survivors are dropped at the end
    for _ in range(steps):
        grown: List[TreeNode] = []
        for node in frontier:
            grown.extend(decoder.expand_inplace(node, [(1, -0.1), (2, -0.7)]))  # clean: pruned or dropped at the end
        frontier = decoder.prune(grown)
    best = frontier[0].tokens
    for node in frontier:
        decoder.refs.drop(node.table)
    return best


if __name__ == "__main__":
    br = BlockRefs(64)
    dec = TreeDecoder(br, 2)
    print(decode(dec, 3), len(br._free))
    rt = dec.root(1)  # clean: dropped below
    dec.append_block(rt)
    hp: List[TreeNode] = []
    for tk in range(4):
        dec.keep_best_strict(hp, rt, tk, -float(tk))
    print(dec.score_all(rt, [1, 2]), dec.first_above(rt, [9], 0.5), verify_path(dec, rt, [1], [1]))
    dec.open_branches(rt, [1, 2])
    br.drop(dec.accept(1))
    for nd in hp:
        br.drop(nd.table)
    la = LookaheadPool(br)
    la.push_level(rt.table, 1), la.pop_level(), la.remember((1,), rt.table), la.forget_all()
    br.drop(rt.table)
    print(len(br._free))
