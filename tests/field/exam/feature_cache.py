"""GPU feature cache with reference counts for graph sampling."""
import logging
from typing import Dict, List, Optional, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class FeatureCache:
    """Rows stay resident while somebody holds a reference to them."""

    def __init__(self, capacity: int, dim: int):
        self.table = torch.zeros(capacity, dim)
        self.row_of: Dict[int, int] = {}
        self.refs: Dict[int, int] = {}
        self.free_rows: List[int] = list(range(capacity))

    def acquire(self, node: int) -> Optional[int]:
        row = self.row_of.get(node)
        if row is None:
            row = self._place(node)
            if row is None:
                return None
        self.refs[node] = self.refs.get(node, 0) + 1
        return row

    def release(self, node: int) -> None:
        n = self.refs[node] - 1
        if n == 0:
            del self.refs[node]
        else:
            self.refs[node] = n

    def _place(self, node: int) -> Optional[int]:
        if not self.free_rows and not self.evict(1):
            return None
        row = self.free_rows.pop()  # clean: recorded in row_of
        self.row_of[node] = row
        self.table[row].normal_()
        return row

    def evict(self, n: int) -> int:
        victims = [v for v in self.row_of if v not in self.refs][:n]
        for v in victims:
            self.free_rows.append(self.row_of.pop(v))
        return len(victims)

    def grow(self, rows: int) -> None:
        old = self.table.shape[0]
        self.table = torch.cat([self.table, torch.zeros(rows, self.table.shape[1])])
        self.free_rows.extend(range(old, old + rows))

    def shrink(self, rows: int) -> int:
        dropped = 0
        while dropped < rows and self.free_rows:
            row = self.free_rows.pop()  # leak: a row that is not the last one is taken out and never put back
            if row != self.table.shape[0] - 1:
                break
            self.table = self.table[:-1]
            dropped += 1
        return dropped


class Sampler:
    def __init__(self, cache: FeatureCache, fanout: int = 4) -> None:
        self.cache = cache
        self.fanout = fanout
        self.pinned: List[int] = []
        self.epoch_nodes: Dict[int, List[int]] = {}

    def gather(self, nodes: Sequence[int]) -> Tensor:
        rows, held = [], []
        for n in nodes:
            r = self.cache.acquire(n)  # clean: near miss, misses are not held and hits are released below
            if r is None:
                continue
            rows.append(r)
            held.append(n)
        out = self.cache.table[rows].clone()
        for n in held:
            self.cache.release(n)
        return out

    def gather_dense(self, nodes: Sequence[int]) -> Optional[Tensor]:
        rows: List[int] = []
        for n in nodes:
            r = self.cache.acquire(n)  # leak: a miss returns None while the earlier nodes stay referenced
            if r is None:
                logger.debug("cache too small for %d nodes", len(nodes))
                return None
            rows.append(r)
        out = self.cache.table[rows].clone()
        for n in nodes:
            self.cache.release(n)
        return out

    def gather_unique(self, nodes: Sequence[int]) -> Tensor:
        rows = []
        for n in nodes:
            r = self.cache.acquire(n)  # leak: duplicate nodes are acquired twice and released once through the set
            if r is not None:
                rows.append(r)
        out = self.cache.table[rows].clone()
        for n in set(nodes):
            if n in self.cache.refs:
                self.cache.release(n)
        return out

    def mean_of(self, node: int) -> float:
        row = self.cache.acquire(node)  # clean: released in finally
        if row is None:
            return 0.0
        try:
            return float(self.cache.table[row].mean())
        finally:
            self.cache.release(node)

    def norm_of(self, node: int) -> float:
        row = self.cache.acquire(node)  # leak: row 0 is treated as a miss by the truth test
        if not row:
            return 0.0
        v = float(self.cache.table[row].norm())
        self.cache.release(node)
        return v

    def pin_hot(self, hot: Sequence[int]) -> None:
        for n in hot:
            if self.cache.acquire(n) is not None:  # clean: near miss, the node is remembered, unpin_hot releases all
                self.pinned.append(n)

    def unpin_hot(self) -> None:
        for n in self.pinned:
            self.cache.release(n)
        self.pinned = []

    def begin_epoch(self, epoch: int, seeds: Sequence[int]) -> None:
        kept = []
        for n in seeds:
            if self.cache.acquire(n) is None:  # leak: end_epoch releases only every fanout-th node
                continue
            kept.append(n)
        self.epoch_nodes[epoch] = kept

    def end_epoch(self, epoch: int) -> None:
        kept = self.epoch_nodes.pop(epoch)
        for i, n in enumerate(kept):
            if i % self.fanout == 0:
                self.cache.release(n)

    def warm(self, nodes: Sequence[int]) -> int:
        return sum(1 for n in nodes if self.cache.acquire(n) is not None)  # leak: references are counted and forgotten
