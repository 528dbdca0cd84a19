"""Paged storage for user histories: fixed-size blocks of item embeddings.

A history is a list of block numbers.  Histories can be forked (the two-stage ranker
scores several continuations of one user), in which case full blocks are shared and
counted by reference.
"""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch


class OutOfBlocks(RuntimeError):
    pass


class BlockStore:
    def __init__(self, nblocks: int, block: int, width: int) -> None:
        self.block = block
        self.data = torch.zeros(nblocks, block, width)
        self._free = list(range(nblocks))
        self._ref = [0] * nblocks
        self.reserved: set[int] = set()

    def new(self) -> int:
        if not self._free:
            raise OutOfBlocks
        b = heapq.heappop(self._free)  # clean: counted and returned
        self._ref[b] = 1
        return b

    def new_below(self, bound: int) -> int | None:
        """For the part of the store that is mirrored on the second device."""
        if not self._free:
            return None
        b = heapq.heappop(self._free)  # leak: a block at or over the bound is not pushed back
        if b >= bound:
            return None
        self._ref[b] = 1
        return b

    def new_unreserved(self) -> int | None:
        skipped = []
        got = None
        while self._free:
            b = heapq.heappop(self._free)  # clean: near miss, reserved blocks are pushed back from skipped
            if b not in self.reserved:
                got = b
                self._ref[b] = 1
                break
            skipped.append(b)
        for b in skipped:
            heapq.heappush(self._free, b)
        return got

    def share(self, b: int) -> int:
        self._ref[b] += 1
        return b

    def unshare(self, b: int) -> None:
        self._ref[b] -= 1
        if self._ref[b] == 0:
            heapq.heappush(self._free, b)

    def shared(self, b: int) -> bool:
        return self._ref[b] > 1


@dataclass
class History:
    uid: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    draft: int | None = None


class HistoryTable:
    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.by_uid: dict[int, History] = {}

    def create(self, uid: int, rows: torch.Tensor) -> History | None:
        if uid in self.by_uid:
            return None
        h = History(uid)
        for part in rows.split(self.store.block):
            try:
                b = self.store.new()  # clean: near miss, the blocks in h are unshared when the store runs out
            except OutOfBlocks:
                for done in h.blocks:
                    self.store.unshare(done)
                return None
            self.store.data[b, : part.shape[0]].copy_(part)
            h.blocks.append(b)
            h.length += part.shape[0]
        self.by_uid[uid] = h
        return h

    def append(self, h: History, row: torch.Tensor) -> None:
        at = h.length % self.store.block
        if at == 0:
            h.blocks.append(self.store.new())  # clean: in h.blocks, unshared by drop()
        elif self.store.shared(h.blocks[-1]):
            fresh = self.store.new()  # clean: near miss, replaces the shared block, which is unshared
            old = h.blocks[-1]
            self.store.data[fresh].copy_(self.store.data[old])
            h.blocks[-1] = fresh
            self.store.unshare(old)
        self.store.data[h.blocks[-1], at].copy_(row)
        h.length += 1

    def set_draft(self, h: History, rows: torch.Tensor) -> None:
        fresh = self.store.new()  # leak: a second draft overwrites the block of the first
        self.store.data[fresh, : rows.shape[0]].copy_(rows)
        h.draft = fresh

    def fork(self, h: History, uid: int) -> History | None:
        blocks = [self.store.share(b) for b in h.blocks]  # leak: shares are kept when the uid exists already
        if uid in self.by_uid:
            return None
        child = History(uid, blocks, h.length)
        self.by_uid[uid] = child
        return child

    def fork_prefix(self, h: History, uid: int, n: int) -> History:
        full = n // self.store.block
        child = History(uid, [self.store.share(b) for b in h.blocks[:full]], full * self.store.block)  # clean: in the child, kept by by_uid or unshared
        prev = self.by_uid.pop(uid, None)
        if prev is not None:
            self._free_blocks(prev)
        self.by_uid[uid] = child
        return child

    def _free_blocks(self, h: History) -> None:
        while h.blocks:
            self.store.unshare(h.blocks.pop())
        if h.draft is not None:
            self.store.unshare(h.draft)
            h.draft = None

    def drop(self, uid: int) -> None:
        h = self.by_uid.pop(uid, None)
        if h is not None:
            self._free_blocks(h)


class Speculator:
    """Scores continuations in scratch blocks that are thrown away."""

    def __init__(self, table: HistoryTable) -> None:
        self.table = table
        self.store = table.store
        self.kept: list[int] = []

    def best(self, h: History, cands: list[torch.Tensor], score) -> int:
        best, best_score = -1, float("-inf")
        for i, c in enumerate(cands):
            b = self.store.new_unreserved()  # leak: break on a perfect score keeps the block
            if b is None:
                break
            self.store.data[b, : c.shape[0]].copy_(c)
            s = score(h, self.store.data[b])
            if s >= 1.0:
                best = i
                break
            if s > best_score:
                best, best_score = i, s
            self.store.unshare(b)
        return best

    def mirrored(self, h: History, c: torch.Tensor, bound: int) -> bool:
        lo = self.store.new_below(bound)  # clean: near miss, unshared when hi is missing
        hi = self.store.new_unreserved() if lo is not None else None  # clean: both go to self.kept, emptied by flush()
        if hi is None:
            if lo is not None:
                self.store.unshare(lo)
            return False
        for b in (lo, hi):
            self.store.data[b, : c.shape[0]].copy_(c)
        self.kept += [lo, hi]
        return True

    def compare(self, a: torch.Tensor, b: torch.Tensor, score) -> bool | None:
        x = self.store.new_unreserved()  # leak: not unshared when there is no block for b
        if x is None:
            return None
        y = self.store.new_unreserved()  # clean: unshared after the comparison
        if y is None:
            return None
        self.store.data[x, : a.shape[0]].copy_(a)
        self.store.data[y, : b.shape[0]].copy_(b)
        res = score(None, self.store.data[x]) > score(None, self.store.data[y])
        for blk in (x, y):
            self.store.unshare(blk)
        return res

    def flush(self) -> None:
        for b in self.kept:
            self.store.unshare(b)
        self.kept.clear()
