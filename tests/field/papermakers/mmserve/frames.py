from __future__ import annotations

import threading
from collections import defaultdict

import torch


class FramePool:
    """uint8 frames of fixed sizes, filled by decoder threads."""

    def __init__(self, per_size: int = 32):
        self.per_size = per_size
        self.made: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.spare: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self.mu = threading.Lock()

    def get_frame(self, h: int, w: int) -> torch.Tensor | None:
        with self.mu:
            if self.spare[h, w]:
                return self.spare[h, w].pop()  # clean: returned to the caller
            if self.made[h, w] >= self.per_size:
                return None
            self.made[h, w] += 1
        return torch.empty(3, h, w, dtype=torch.uint8, pin_memory=True)

    def put_frame(self, frame: torch.Tensor) -> None:
        _, h, w = frame.shape
        with self.mu:
            self.spare[h, w].append(frame)


class Workspace:
    """Named views on one device arena, bump allocated and popped by mark."""

    def __init__(self, nbytes: int, device: str):
        self.raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.top = 0
        self.open_marks = 0

    def mark(self) -> int:
        self.open_marks += 1
        return self.top

    def rewind(self, mark: int) -> None:
        self.open_marks -= 1
        self.top = mark

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        n = int(torch.Size(shape).numel()) * dtype.itemsize
        view = self.raw[self.top : self.top + n].view(dtype).view(shape)
        self.top += n
        return view
