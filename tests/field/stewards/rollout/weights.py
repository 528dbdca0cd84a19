from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Iterable, Optional

import torch


@dataclass(eq=False)
class SyncBuffer:
    data: torch.Tensor
    used: int = 0


class SyncBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._free = [SyncBuffer(torch.empty(numel)) for _ in range(count)]
        self._lock = threading.Lock()

    def reserve(self) -> Optional[SyncBuffer]:
        with self._lock:
            return self._free.pop() if self._free else None

    def unreserve(self, buf: SyncBuffer) -> None:
        buf.used = 0
        with self._lock:
            self._free.append(buf)


class WeightSync:
    """Packs parameters into buckets and hands full buckets to the transport in order."""

    def __init__(self, pool: SyncBufferPool) -> None:
        self.pool = pool
        self.full: list[SyncBuffer] = []

    def _put(self, buf: SyncBuffer, flat: torch.Tensor) -> None:
        buf.data[buf.used:buf.used + flat.numel()].copy_(flat)
        buf.used += flat.numel()

    def pack(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        buf = self.pool.reserve()  # clean: near miss, full buckets are appended before rebinding, the last one after the loop
        if buf is None:
            return 0
        packed = 0
        for _, p in named:
            if p.numel() > self.pool.numel:
                continue
            if buf.used + p.numel() > self.pool.numel:
                self.full.append(buf)
                buf = self.pool.reserve()  # clean: near miss, rebinds only what has gone to full
                if buf is None:
                    return packed
            self._put(buf, p.detach().flatten())
            packed += 1
        self.full.append(buf)
        return packed

    def pack_experts(self, experts: dict[int, torch.Tensor]) -> int:
        packed = 0
        for _, weight in sorted(experts.items()):
            buf = self.pool.reserve()  # leak: an expert larger than a bucket is skipped with the bucket in hand
            if buf is None:
                break
            if weight.numel() > self.pool.numel:
                continue
            self._put(buf, weight.detach().flatten())
            self.full.append(buf)
            packed += 1
        return packed

    def drain(self) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for buf in self.full:
            out.append(buf.data[:buf.used].clone())
            self.pool.unreserve(buf)
        self.full.clear()
        return out

    def checksum(self, named: Iterable[tuple[str, torch.Tensor]]) -> float:
        total = 0.0
        buf = self.pool.reserve()  # leak: a name that is excluded returns from the middle of the loop
        if buf is None:
            return total
        for name, p in named:
            if name.endswith("._extra_state"):
                return total
            n = min(p.numel(), self.pool.numel)
            buf.data[:n].copy_(p.detach().flatten()[:n])
            total += float(buf.data[:n].sum())
        self.pool.unreserve(buf)
        return total
