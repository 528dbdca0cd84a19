"""Feature buffers for encoder outputs and shared-memory segments for raw media."""
from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from typing import Optional

import torch


class FeaturePool:
    def __init__(self, count: int, tokens: int, hidden: int) -> None:
        self.tokens = tokens
        self._free = [torch.empty(tokens, hidden) for _ in range(count)]

    def obtain(self) -> Optional[torch.Tensor]:
        return self._free.pop() if self._free else None

    def restore(self, buf: torch.Tensor) -> None:
        self._free.append(buf)


class SegmentPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._free = [SharedMemory(create=True, size=nbytes) for _ in range(count)]  # clean: near miss, owned by the pool and unlinked by destroy()

    def grab(self) -> Optional[SharedMemory]:
        if not self._free:
            return None
        return self._free.pop()

    def put(self, seg: SharedMemory) -> None:
        self._free.append(seg)

    def destroy(self) -> None:
        while self._free:
            seg = self._free.pop()
            seg.close()
            seg.unlink()
