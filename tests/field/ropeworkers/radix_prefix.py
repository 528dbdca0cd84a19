"""Radix prefix cache over a token-slot pool. A node is evictable once nobody has it locked."""
from __future__ import annotations

import heapq
import time
from typing import Dict, Iterable, List, Optional, Tuple

import torch


class TokenSlotPool:
    """KV memory handed out one token at a time, as index tensors."""

    def __init__(self, size: int, device: str = "cpu"):
        self.device = device
        self._free = torch.arange(size, dtype=torch.int64, device=device)

    def available(self) -> int:
        return int(self._free.numel())

    def alloc(self, n: int) -> Optional[torch.Tensor]:
        if n > self._free.numel():
            return None
        out = self._free[:n]
        self._free = self._free[n:]
        return out

    def give(self, idx: torch.Tensor) -> None:
        self._free = torch.cat([self._free, idx])


class RowPool:
    """Rows of the request -> token table."""

    def __init__(self, rows: int, width: int):
        self.table = torch.zeros(rows, width, dtype=torch.int64)
        self._rows = list(range(rows))

    def claim(self) -> Optional[int]:
        if not self._rows:
            return None
        return self._rows.pop()

    def yield_row(self, row: int) -> None:
        self._rows.append(row)


class Node:
    __slots__ = ("parent", "children", "key", "slots", "locks", "last_used")

    def __init__(self, parent: Optional["Node"], key: Tuple[int, ...], slots: torch.Tensor):
        self.parent = parent
        self.children: Dict[int, Node] = {}
        self.key = key
        self.slots = slots
        self.locks = 0
        self.last_used = time.monotonic()

    def __lt__(self, other: "Node") -> bool:
        return self.last_used < other.last_used


class RadixCache:
    def __init__(self, pool: TokenSlotPool):
        self.pool = pool
        self.root = Node(None, (), torch.empty(0, dtype=torch.int64))

    def match(self, tokens: List[int]) -> Tuple[Node, int]:
        node, done = self.root, 0
        while done < len(tokens):
            nxt = node.children.get(tokens[done])
            if nxt is None or tuple(tokens[done:done + len(nxt.key)]) != nxt.key:
                break
            node, done = nxt, done + len(nxt.key)
        node.last_used = time.monotonic()
        return node, done

    def lock_path(self, node: Node) -> None:
        while node is not None:
            node.locks += 1
            node = node.parent

    def unlock_path(self, node: Node) -> None:
        while node is not None:
            node.locks -= 1
            node = node.parent

    def insert(self, tokens: List[int], slots: torch.Tensor) -> int:
        """Takes over the slots past the known prefix; the caller keeps those of the overlap.

        Edges are not split: a prompt that diverges inside an edge is not cached.
        """
        node, done = self.match(tokens)
        if done == len(tokens) or tokens[done] in node.children:
            return len(tokens)
        node.children[tokens[done]] = Node(node, tuple(tokens[done:]), slots[done:])
        return done

    def evict(self, want: int) -> int:
        leaves = [n for n in self._walk(self.root) if not n.children and n.locks == 0]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < want:
            n = heapq.heappop(leaves)
            if n is self.root:
                continue
            self.pool.give(n.slots)
            freed += len(n.key)
            del n.parent.children[n.key[0]]
        return freed

    def _walk(self, node: Node) -> Iterable[Node]:
        yield node
        for c in list(node.children.values()):
            yield from self._walk(c)


class Req:
    def __init__(self, rid: str, tokens: List[int]):
        self.rid = rid
        self.tokens = tokens
        self.row: Optional[int] = None
        self.node: Optional[Node] = None
        self.own: Optional[torch.Tensor] = None


class PrefillAdder:
    def __init__(self, cache: RadixCache, rows: RowPool, pool: TokenSlotPool):
        self.cache = cache
        self.rows = rows
        self.pool = pool
        self.running: Dict[str, Req] = {}

    def _alloc_evicting(self, n: int) -> Optional[torch.Tensor]:
        idx = self.pool.alloc(n)  # clean: returned to the caller
        if idx is None:
            self.cache.evict(n - self.pool.available())
            idx = self.pool.alloc(n)  # clean: near miss, the first try had returned None so nothing is overwritten
        return idx

    def add(self, req: Req) -> bool:
        node, done = self.cache.match(req.tokens)
        self.cache.lock_path(node)  # leak: path stays locked when no row is free
        row = self.rows.claim()  # clean: given back when slots run out, else in the request
        if row is None:
            return False
        fresh = self._alloc_evicting(len(req.tokens) - done)  # clean: kept by the request until finish()
        if fresh is None:
            self.rows.yield_row(row)
            self.cache.unlock_path(node)
            return False
        req.row, req.node, req.own = row, node, fresh
        self.running[req.rid] = req
        return True

    def add_chunked(self, req: Req, budget: int) -> int:
        """Admit at most `budget` tokens of a long prompt."""
        node, done = self.cache.match(req.tokens)
        take = min(budget, len(req.tokens) - done)
        if take <= 0:
            return 0
        row = self.rows.claim()  # leak: not yielded when slots run out
        if row is None:
            return 0
        idx = self._alloc_evicting(take)  # clean: kept by the request until finish()
        if idx is None:
            return 0
        self.cache.lock_path(node)  # clean: unlocked by finish() through req.node
        req.row, req.node, req.own = row, node, idx
        self.running[req.rid] = req
        return take

    def extend(self, req: Req, n: int) -> bool:
        more = self._alloc_evicting(n)  # clean: near miss, concatenated into req.own, which finish() gives back
        if more is None:
            return False
        req.own = torch.cat([req.own, more])
        return True

    def probe(self, tokens: List[int]) -> bool:
        """True if the prompt would fit right now."""
        node, done = self.cache.match(tokens)
        self.cache.lock_path(node)  # clean: unlocked in finally
        try:
            idx = self._alloc_evicting(len(tokens) - done)  # leak: the probe's slots are never given back
            return idx is not None
        finally:
            self.cache.unlock_path(node)

    def warm(self, prompts: List[List[int]]) -> int:
        """Fill the cache with system prompts at start."""
        filled = 0
        for tokens in prompts:
            node, done = self.cache.match(tokens)
            if done == len(tokens):
                continue
            slots = self.pool.alloc(len(tokens))  # leak: slots of an overlapping prefix are not given back after insert
            if slots is None:
                break
            self.cache.insert(tokens, slots)
            filled += 1
        return filled

    def warm_one(self, tokens: List[int]) -> int:
        slots = self.pool.alloc(len(tokens))  # clean: near miss, the overlap is given back and the tree owns the rest
        if slots is None:
            return 0
        known = self.cache.insert(tokens, slots)
        if known:
            self.pool.give(slots[:known])
        return len(tokens) - known

    def finish(self, req: Req) -> None:
        self.running.pop(req.rid, None)
        self.pool.give(req.own)
        self.rows.yield_row(req.row)
        self.cache.unlock_path(req.node)
        req.own = req.row = req.node = None
