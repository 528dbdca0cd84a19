from __future__ import annotations

from collections import deque

import torch

from .buffers import SwapBuffer, SwapBufferPool


class Swapper:
    def __init__(self, pool: SwapBufferPool) -> None:
        self.pool = pool
        self.writes: deque[tuple[str, SwapBuffer]] = deque()
        self.disk: dict[str, torch.Tensor] = {}
        self.current: SwapBuffer | None = None

    def write(self, name: str, t: torch.Tensor) -> bool:
        buf = self.pool.request()  # clean: near miss, relinquished for an oversized tensor, else finish_writes does it
        if buf is None:
            return False
        if not buf.append(t):
            self.pool.relinquish(buf)
            return False
        self.writes.append((name, buf))
        return True

    def finish_writes(self) -> int:
        n = 0
        while self.writes:
            name, buf = self.writes.popleft()
            self.disk[name] = buf.data[: buf.filled].clone()
            self.pool.relinquish(buf)
            n += 1
        return n

    def pack(self, tensors: list[torch.Tensor]) -> int:
        if self.current is None:
            self.current = self.pool.request()  # clean: near miss, fills an empty field which close_pack relinquishes
        stored = 0
        for t in tensors:
            if self.current is None:
                break
            if not self.current.append(t):
                self.disk[f"pack{len(self.disk)}"] = self.current.data.clone()
                self.current = self.pool.request()  # leak: the full buffer in the field is replaced without being relinquished
                continue
            stored += 1
        return stored

    def close_pack(self) -> None:
        if self.current is not None:
            self.pool.relinquish(self.current)
            self.current = None

    def read(self, names: list[str]) -> list[torch.Tensor]:
        bufs = self.pool.request_many(len(names))  # leak: a name that is not on disk breaks the loop and the rest of the buffers stay out
        out: list[torch.Tensor] = []
        for name, buf in zip(names, bufs):
            if name not in self.disk:
                break
            buf.append(self.disk[name])
            out.append(buf.data[: buf.filled].clone())
            self.pool.relinquish(buf)
        return out

    def read_known(self, names: list[str]) -> list[torch.Tensor]:
        bufs = self.pool.request_many(len(names))  # clean: near miss, all of them are relinquished after the loop that may break
        out: list[torch.Tensor] = []
        for name, buf in zip(names, bufs):
            if name not in self.disk:
                break
            buf.append(self.disk[name])
            out.append(buf.data[: buf.filled].clone())
        for buf in bufs:
            self.pool.relinquish(buf)
        return out
