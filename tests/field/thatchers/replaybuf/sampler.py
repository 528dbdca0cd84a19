from __future__ import annotations

import random
from collections import OrderedDict

from .segments import Segment, SegmentStore


class PrioritySampler:
    """Holds the one table reference of every inserted segment; samples carry their own."""

    def __init__(self, store: SegmentStore, capacity: int, seed: int = 0) -> None:
        self.store = store
        self.capacity = capacity
        self.rng = random.Random(seed)
        self.table: "OrderedDict[int, Segment]" = OrderedDict()

    def insert(self, seg: Segment) -> None:
        while len(self.table) >= self.capacity:
            _, old = self.table.popitem(last=False)
            self.store.drop(old)
        self.table[seg.row] = seg

    def sample(self, n: int) -> list[Segment]:
        rows = list(self.table)
        if not rows:
            return []
        weights = [self.table[r].priority for r in rows]
        picked: list[Segment] = []
        for row in self.rng.choices(rows, weights, k=n):
            seg = self.store.retain(row)  # clean: in the list that the caller gives to release()
            if seg is not None:
                picked.append(seg)
        return picked

    def sample_unique(self, n: int) -> list[Segment]:
        picked: dict[int, Segment] = {}
        rows = list(self.table)
        for row in self.rng.choices(rows, k=4 * n) if rows else ():
            seg = self.store.retain(row)  # leak: a row drawn twice replaces its dict entry, one reference too many stays
            if seg is None:
                continue
            picked[row] = seg
            if len(picked) == n:
                break
        return list(picked.values())

    def release(self, batch: list[Segment]) -> None:
        for seg in batch:
            self.store.drop(seg)

    def update_priority(self, row: int, value: float) -> bool:
        seg = self.store.retain(row)  # clean: near miss, dropped before either return
        if seg is None:
            return False
        changed = abs(seg.priority - value) > 1e-6
        seg.priority = value
        self.store.drop(seg)
        return changed

    def clear(self) -> None:
        self.release(list(self.table.values()))
        self.table.clear()
