from __future__ import annotations

from typing import Iterable, Optional

import torch

from .workers import Worker, WorkerPool


class FlatBuffers:
    def __init__(self, n: int, numel: int) -> None:
        self.numel = numel
        self._free = [torch.empty(numel, pin_memory=True) for _ in range(n)]

    def pop(self) -> Optional[torch.Tensor]:
        return self._free.pop() if self._free else None

    def push(self, t: torch.Tensor) -> None:
        self._free.append(t)


class WeightSync:
    def __init__(self, bufs: FlatBuffers, pool: WorkerPool) -> None:
        self.bufs = bufs
        self.pool = pool
        self.version = 0
        self._published: Optional[torch.Tensor] = None

    def flatten(self, params: Iterable[torch.Tensor]) -> Optional[torch.Tensor]:
        flat = self.bufs.pop()  # leak: parameters that do not fit end in None with the buffer out
        if flat is None:
            return None
        at = 0
        for p in params:
            if at + p.numel() > self.bufs.numel:
                return None
            flat[at : at + p.numel()].copy_(p.detach().view(-1))
            at += p.numel()
        return flat

    def publish(self, params: Iterable[torch.Tensor]) -> int:
        flat = self.flatten(params)  # clean: near miss, the former publication is pushed back before it is replaced
        if flat is None:
            return self.version
        if self._published is not None:
            self.bufs.push(self._published)
        self._published = flat
        self.version += 1
        return self.version

    async def update_all(self) -> int:
        got: list[Worker] = []
        while len(got) < self.pool.size:
            w = await self.pool.acquire()  # clean: near miss, all workers are held for the update and released in a loop
            got.append(w)
        for w in got:
            await w.load(self.version, self._published)
            self.pool.release(w)
        return len(got)

    async def update_idle(self) -> int:
        n = 0
        while True:
            w = self.pool.acquire_nowait()  # leak: the first worker that is up to date ends the loop without release
            if w is None:
                break
            if w.version == self.version:
                break
            await w.load(self.version, self._published)
            self.pool.release(w)
            n += 1
        return n

    def close(self) -> None:
        if self._published is not None:
            self.bufs.push(self._published)
            self._published = None
