"""Fixed device slots, each large enough for one expert."""
import threading
from typing import List, Optional

import torch


class NoSlot(Exception):
    pass


class SlotTable:
    def __init__(self, n: int, numel: int, device):
        self._mem = torch.empty(n, numel, device=device, dtype=torch.bfloat16)
        self._stack: List[int] = list(range(n))
        self._cv = threading.Condition()

    def reserve(self) -> int:
        with self._cv:  # clean: with block
            if not self._stack:
                raise NoSlot
            return self._stack.pop()  # clean: returned

    def reserve_wait(self, timeout: float) -> Optional[int]:
        with self._cv:  # clean: with block
            if not self._cv.wait_for(lambda: self._stack, timeout):
                return None
            return self._stack.pop()  # clean: returned

    def vacate(self, slot: int) -> None:
        with self._cv:  # clean: with block
            self._stack.append(slot)
            self._cv.notify()

    def weights(self, slot: int) -> torch.Tensor:
        return self._mem[slot]
