from __future__ import annotations

import queue
from typing import Optional

import torch
from torch import Tensor


class StagingRing:
    def __init__(self, nbytes: int, depth: int):
        self.nbytes = nbytes
        self._ring: queue.Queue[Tensor] = queue.Queue()
        for _ in range(depth):
            self._ring.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def pick(self, timeout: Optional[float] = None) -> Optional[Tensor]:
        try:
            return self._ring.get(timeout=timeout)
        except queue.Empty:
            return None

    def lay_back(self, buf: Tensor) -> None:
        self._ring.put(buf)

    def pick_pair(self, timeout: float) -> Optional[tuple[Tensor, Tensor]]:
        a = self.pick(timeout)  # clean: near miss, laid back when no second one comes, else handed to the caller
        if a is None:
            return None
        b = self.pick(timeout)  # clean: handed to the caller
        if b is None:
            self.lay_back(a)
            return None
        return a, b
