from __future__ import annotations

import heapq
import threading
from typing import Protocol


class SlotSource(Protocol):
    def pull(self) -> int | None: ...

    def push_back(self, slot: int) -> None: ...


class EpochSlots:
    """Sequence slots that become usable again after the epoch they were freed in."""

    def __init__(self, n: int):
        self.epoch = 0
        self.heap: list[tuple[int, int]] = [(0, i) for i in range(n)]

    def pull(self) -> int | None:
        if not self.heap or self.heap[0][0] > self.epoch:
            return None
        _, slot = heapq.heappop(self.heap)  # clean: returned to the caller
        return slot

    def push_back(self, slot: int) -> None:
        heapq.heappush(self.heap, (self.epoch + 1, slot))

    def tick(self) -> None:
        self.epoch += 1


class GuardedSlots:
    """Wraps a source with a lock and a soft limit for batch traffic."""

    def __init__(self, inner: SlotSource, soft: int):
        self.inner = inner
        self.soft = soft
        self.out = 0
        self.mu = threading.Lock()

    def pull(self) -> int | None:
        with self.mu:
            slot = self.inner.pull()  # clean: near miss, out only counts, the slot is returned either way
            if slot is not None:
                self.out += 1
            return slot

    def pull_batch(self) -> int | None:
        with self.mu:
            slot = self.inner.pull()  # leak: over the soft limit None is returned and the slot forgotten
            if slot is None or self.out >= self.soft:
                return None
            self.out += 1
            return slot

    def push_back(self, slot: int) -> None:
        with self.mu:
            self.out -= 1
            self.inner.push_back(slot)


class SegmentHeap:
    """KV segments of a fixed token length, lowest address first."""

    def __init__(self, n: int):
        self.addr = list(range(n))
        heapq.heapify(self.addr)

    def lowest(self) -> int:
        return heapq.heappop(self.addr)  # clean: returned to the caller

    def restore(self, seg: int) -> None:
        heapq.heappush(self.addr, seg)

    def __len__(self) -> int:
        return len(self.addr)
