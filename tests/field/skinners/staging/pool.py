"""Pools of pinned staging buffers, and a two-tier front end."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Protocol

import torch


@dataclass(eq=False)
class StagingBuffer:
    data: torch.Tensor
    home: "PinnedPool"
    used: int = 0
    tags: Dict[str, object] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.data.numel()


class BufferSource(Protocol):
    def lend(self, nbytes: int) -> Optional[StagingBuffer]: ...

    def restore(self, buf: StagingBuffer) -> None: ...


class PinnedPool:
    def __init__(self, count: int, size: int):
        self.size = size
        self._spare: List[StagingBuffer] = [
            StagingBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=True), self) for _ in range(count)
        ]
        self._out = 0
        self._lock = threading.Lock()

    def lend(self, nbytes: int) -> Optional[StagingBuffer]:
        if nbytes > self.size:
            return None
        with self._lock:
            if not self._spare:
                return None
            self._out += 1
            buf = self._spare.pop()
            buf.used = nbytes
            return buf

    def restore(self, buf: StagingBuffer) -> None:
        buf.used = 0
        buf.tags.clear()
        with self._lock:
            self._out -= 1
            self._spare.append(buf)


class TieredPool:
    """Small requests are served from the small tier, everything else from the large one."""

    def __init__(self, small: PinnedPool, large: PinnedPool):
        self._small = small
        self._large = large

    def lend(self, nbytes: int) -> Optional[StagingBuffer]:
        if nbytes <= self._small.size:
            buf = self._small.lend(nbytes)  # clean: handed to the caller
            if buf is not None:
                return buf
        return self._large.lend(nbytes)  # clean: handed to the caller

    def restore(self, buf: StagingBuffer) -> None:
        buf.home.restore(buf)

    def upgrade(self, buf: StagingBuffer, nbytes: int) -> Optional[StagingBuffer]:
        """Exchange a buffer for a larger one, keeping its contents."""
        bigger = self._large.lend(nbytes)  # clean: handed to the caller in exchange
        if bigger is None:
            return None
        bigger.data[:buf.used].copy_(buf.data[:buf.used])
        bigger.tags.update(buf.tags)
        buf.home.restore(buf)
        return bigger


class QuotaSource:
    """Per-tenant front end with a limit on buffers outstanding."""

    def __init__(self, source: BufferSource, limit: int):
        self._source = source
        self._limit = limit
        self._held = 0

    def lend(self, nbytes: int) -> Optional[StagingBuffer]:
        buf = self._source.lend(nbytes)  # leak: over the limit the buffer is dropped and None returned
        if buf is None:
            return None
        if self._held >= self._limit:
            return None
        self._held += 1
        return buf

    def restore(self, buf: StagingBuffer) -> None:
        self._held -= 1
        self._source.restore(buf)


class AuditedSource:
    def __init__(self, source: BufferSource, limit: int):
        self._source = source
        self._limit = limit
        self._held: Dict[int, StagingBuffer] = {}

    def lend(self, nbytes: int) -> Optional[StagingBuffer]:
        buf = self._source.lend(nbytes)  # clean: restored at the limit, else handed on
        if buf is None:
            return None
        if len(self._held) >= self._limit:
            self._source.restore(buf)
            return None
        self._held[id(buf)] = buf
        return buf

    def restore(self, buf: StagingBuffer) -> None:
        del self._held[id(buf)]
        self._source.restore(buf)
