"""Draft trees for speculative decoding with tree attention."""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional

log = logging.getLogger(__name__)


class NodePool:
    """Slots of the tree KV buffer, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        heapq.heapify(self._free)

    def alloc(self) -> Optional[int]:
        if not self._free:
            return None
        return heapq.heappop(self._free)

    def free(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def alloc_many(self, n: int) -> Optional[list[int]]:
        got: list[int] = []
        for _ in range(n):
            slot = self.alloc()  # leak: slots already got are forgotten when the pool runs dry
            if slot is None:
                return None
            got.append(slot)
        return got

    def alloc_chain(self, n: int) -> Optional[list[int]]:
        got: list[int] = []
        while len(got) < n:
            slot = self.alloc()  # clean: near miss, rolled back when the pool runs dry
            if slot is None:
                for s in reversed(got):
                    self.free(s)
                return None
            got.append(slot)
        return got

    def available(self) -> int:
        return len(self._free)


@dataclass
class Node:
    slot: int
    token: int
    parent: Optional[int]
    logp: float


class DraftTree:
    """Every node of the tree owns its slot until commit or discard."""

    def __init__(self, pool: NodePool) -> None:
        self.pool = pool
        self.nodes: dict[int, Node] = {}

    def expand(self, parent: Optional[int], cands: Iterable[tuple[int, float]]) -> int:
        added = 0
        for token, logp in cands:
            slot = self.pool.alloc()  # clean: stored in the tree, freed by commit or discard
            if slot is None:
                break
            self.nodes[slot] = Node(slot, token, parent, logp)
            added += 1
        return added

    def commit(self, path: list[int]) -> list[int]:
        """Keep the accepted path; its slots pass to the caller."""
        keep = set(path)
        for slot in list(self.nodes):
            if slot not in keep:
                self.pool.free(slot)
        self.nodes.clear()
        return path

    def discard(self) -> None:
        for slot in self.nodes:
            self.pool.free(slot)
        self.nodes.clear()

    def absorb(self, other: "DraftTree") -> None:
        self.nodes.update(other.nodes)
        other.nodes.clear()


class BeamTree:
    def __init__(self, pool: NodePool, floor: float) -> None:
        self.pool = pool
        self.floor = floor
        self.live: dict[int, Node] = {}

    def push(self, parent: Optional[int], token: int, logp: float) -> Optional[int]:
        slot = self.pool.alloc()  # leak: prune drops nodes from the table without freeing them
        if slot is None:
            return None
        self.live[slot] = Node(slot, token, parent, logp)
        return slot

    def prune(self) -> None:
        self.live = {s: n for s, n in self.live.items() if n.logp >= self.floor}

    def close(self) -> None:
        for slot in self.live:
            self.pool.free(slot)
        self.live.clear()


@dataclass
class Sequence:
    seq_id: int
    slots: list[int] = field(default_factory=list)

    def release(self, pool: NodePool) -> None:
        while self.slots:
            pool.free(self.slots.pop())


def start_sequence(pool: NodePool, seq_id: int) -> Optional[Sequence]:
    root = pool.alloc()  # leak: slot 0 is taken for a failed allocation
    if not root:
        log.info("tree pool exhausted, seq %d waits", seq_id)
        return None
    return Sequence(seq_id, [root])


def resume_sequence(pool: NodePool, seq_id: int, length: int) -> Optional[Sequence]:
    slots = pool.alloc_chain(length)  # clean: moved into the sequence
    if slots is None:
        return None
    return Sequence(seq_id, slots)


def fork_sequence(pool: NodePool, src: Sequence, copy: Callable[[int, int], bool]) -> Optional[Sequence]:
    slots = pool.alloc_many(len(src.slots))  # leak: a failed copy returns without freeing
    if slots is None:
        return None
    for a, b in zip(src.slots, slots):
        if not copy(a, b):
            return None
    return Sequence(src.seq_id, slots)


def score_candidates(pool: NodePool, tokens: list[int], score: Callable[[int, int], float], floor: float) -> list[Node]:
    kept = []
    for tok in tokens:
        slot = pool.alloc()  # leak: candidates below the floor are skipped with their slot
        if slot is None:
            break
        logp = score(slot, tok)
        if logp < floor:
            continue
        kept.append(Node(slot, tok, None, logp))
    return kept


def verify(pool: NodePool, tree: DraftTree, target: Callable[[int, int], bool]) -> list[int]:
    bonus = pool.alloc()  # clean: freed unless it joins the accepted path
    accepted: list[int] = []
    for slot, node in tree.nodes.items():
        if not target(slot, node.token):
            break
        accepted.append(slot)
    path = tree.commit(accepted)
    if bonus is None:
        return path
    if not path:
        pool.free(bonus)
        return path
    return path + [bonus]


def decode_round(pool: NodePool, seq: Sequence, cands: list[tuple[int, float]], target: Callable[[int, int], bool]) -> int:
    tree = DraftTree(pool)
    tree.expand(None, cands)
    fresh = verify(pool, tree, target)  # clean: slots pass to the sequence
    seq.slots.extend(fresh)
    return len(fresh)


def probe_depth(pool: NodePool, depth: int, limit: int) -> int:
    """Depth that can be drafted before the pool or the limit stops it."""
    slot = pool.alloc()  # clean: near miss, freed after the recursion unwinds
    if slot is None:
        return depth
    reached = depth + 1 if depth + 1 >= limit else probe_depth(pool, depth + 1, limit)
    pool.free(slot)
    return reached
