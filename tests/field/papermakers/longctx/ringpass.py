from __future__ import annotations

import torch

from .slots import SegmentHeap


class RingPasser:
    """Double buffered KV exchange with the neighbours of the ring."""

    def __init__(self, comm, segs: SegmentHeap, kv: torch.Tensor):
        self.comm = comm
        self.segs = segs
        self.kv = kv
        self.spare: list[torch.Tensor] = []

    def borrow(self) -> torch.Tensor:
        if self.spare:
            return self.spare.pop()  # clean: returned to the caller
        return torch.empty_like(self.kv[0])

    def give_back(self, t: torch.Tensor) -> None:
        self.spare.append(t)

    def rotate(self, seg: int, hops: int, attend) -> None:
        cur = self.borrow()  # clean: near miss, swapped with nxt every hop, both given back after the loop
        nxt = self.borrow()  # clean: given back after the loop
        cur.copy_(self.kv[seg])
        for _ in range(hops):
            work = self.comm.exchange(cur, nxt)
            attend(cur)
            work.wait()
            cur, nxt = nxt, cur
        self.give_back(cur)
        self.give_back(nxt)

    def rotate_early(self, seg: int, hops: int, attend) -> int:
        """Stops once the attention sink absorbed enough mass."""
        cur = self.borrow()  # clean: given back after the loop
        cur.copy_(self.kv[seg])
        done = 0
        for _ in range(hops):
            nxt = self.borrow()  # leak: not given back when attend asks to stop
            self.comm.exchange(cur, nxt).wait()
            if attend(nxt):
                break
            self.give_back(cur)
            cur = nxt
            done += 1
        self.give_back(cur)
        return done

    def snapshot(self, seg: int) -> torch.Tensor:
        """Copy of one segment; the caller gives it back."""
        t = self.borrow()  # clean: returned to the caller
        t.copy_(self.kv[seg])
        return t

    def drift(self, seg: int, reference: torch.Tensor) -> float:
        cur = self.snapshot(seg).float()  # leak: float() makes a copy and the borrowed tensor is dropped
        return (cur - reference.float()).norm().item()
