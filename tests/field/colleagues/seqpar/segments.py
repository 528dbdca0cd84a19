"""Ring of symmetric-memory segments; cut at the head, mended in any order."""
from __future__ import annotations

import torch

class SegmentRing:
    def __init__(self, count: int, seg_elems: int) -> None:
        self.mem = torch.empty(count, seg_elems, device="cuda", dtype=torch.bfloat16)
        self.count = count
        self.head = 0
        self.tail = 0
        self.mended = [False] * count
    def room(self) -> int:
        return self.count - (self.head - self.tail)
    def cut(self) -> int:
        """Index of the next segment, -1 when the ring is full."""
        if self.head - self.tail == self.count:
            return -1
        i = self.head % self.count
        self.mended[i] = False
        self.head += 1
        return i
    def mend(self, i: int) -> None:
        self.mended[i] = True
        while self.tail < self.head and self.mended[self.tail % self.count]:
            self.tail += 1
    def cut_run(self, n: int) -> list[int]:
        """n segments or none."""
        if self.room() < n:
            return []
        return [self.cut() for _ in range(n)]  # clean: near miss, room was checked; list goes to caller
    def row(self, i: int) -> torch.Tensor:
        return self.mem[i]

class Loan:
    """with ring_loan as i: one segment for the body of the with."""
    def __init__(self, ring: SegmentRing) -> None:
        self.ring, self.i = ring, -1
    def __enter__(self) -> int:
        self.i = self.ring.cut()  # clean: near miss, __exit__ mends unless it was -1
        return self.i
    def __exit__(self, *exc) -> None:
        if self.i < 0:
            return
        self.ring.mend(self.i)
        self.i = -1
