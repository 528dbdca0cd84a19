"""Staging arena: one big host buffer cut into equal slabs."""
from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Optional


@dataclass
class Slab:
    offset: int
    view: memoryview
    filled: int = 0


class StagingArena:
    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self._backing = memoryview(bytearray(slabs * slab_bytes))
        self._q: "queue.Queue[Slab]" = queue.Queue()
        for i in range(slabs):
            self._q.put(Slab(i * slab_bytes, self._backing[i * slab_bytes: (i + 1) * slab_bytes]))

    def obtain(self, timeout: Optional[float] = None) -> Optional[Slab]:
        try:
            slab = self._q.get(timeout=timeout) if timeout is not None else self._q.get_nowait()
        except queue.Empty:
            return None
        slab.filled = 0
        return slab

    def recycle(self, slab: Slab) -> None:
        self._q.put(slab)

    def obtain_run(self, n: int) -> Optional[list[Slab]]:
        run: list[Slab] = []
        for _ in range(n):
            slab = self.obtain()  # leak: the partial run is dropped when the queue is empty
            if slab is None:
                return None
            run.append(slab)
        return run

    def idle(self) -> int:
        return self._q.qsize()
