"""Offloading of parameters and saved activations to pinned host memory."""
from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PinnedBuffer:
    numel: int
    storage: Any


class PinnedPool:
    """Page-locked staging buffers under a fixed budget of elements."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._spare: List[PinnedBuffer] = []

    def alloc(self, numel: int) -> Optional[PinnedBuffer]:
        for i, buf in enumerate(self._spare):
            if buf.numel == numel:
                self.budget -= numel
                return self._spare.pop(i)
        if self.budget < numel:
            return None
        self.budget -= numel
        if torch is not None and torch.cuda.is_available():
            return PinnedBuffer(numel, torch.empty(numel, pin_memory=True))
        return PinnedBuffer(numel, [0.0] * numel)

    def free(self, buf: PinnedBuffer) -> None:
        self.budget += buf.numel
        self._spare.append(buf)


class CopyStream:
    def copy(self, buf: PinnedBuffer, src: Any) -> None:
        for i, value in enumerate(src):
            buf.storage[i] = value


class StreamPool:
    def __init__(self, n: int) -> None:
        self._streams = [CopyStream() for _ in range(n)]

    def get(self) -> Optional[CopyStream]:
        return self._streams.pop() if self._streams else None

    def put(self, stream: CopyStream) -> None:
        self._streams.append(stream)

    def __len__(self) -> int:
        return len(self._streams)


class ParamOffloader:
    def __init__(self, pool: PinnedPool, streams: StreamPool, limit: int = 4) -> None:
        self.pool = pool
        self.streams = streams
        self.limit = limit
        self._host: Dict[str, PinnedBuffer] = {}

    def offload(self, name: str, values: List[float]) -> bool:
        if name in self._host:
            self.drop(name)
        buf = self.pool.alloc(len(values))  # clean: near miss, the former entry was dropped before this one is stored
        if buf is None:
            return False
        stream = self.streams.get()  # clean: put back before the entry is made
        if stream is None:
            self.pool.free(buf)
            return False
        stream.copy(buf, values)
        self.streams.put(stream)
        self._host[name] = buf
        return True

    def drop(self, name: str) -> None:
        self.pool.free(self._host.pop(name))

    def fetch(self, name: str) -> List[float]:
        buf = self._host.pop(name)
        values = list(buf.storage)
        self.pool.free(buf)
        return values

    def mirror(self, name: str, values: List[float]) -> bool:
        buf = self.pool.alloc(len(values))  # leak: stays allocated when no stream is free
        if buf is None:
            return False
        stream = self.streams.get()  # clean: None-checked and put back
        if stream is None:
            logger.debug("no copy stream for %s", name)
            return False
        stream.copy(buf, values)
        self.streams.put(stream)
        if name in self._host:
            self.drop(name)
        self._host[name] = buf
        return True

    def round_trip(self, values: List[float]) -> List[float]:
        staged: Optional[PinnedBuffer] = None
        if len(values) > self.limit:
            staged = self.pool.alloc(len(values))  # clean: near miss, the same test guards the free
            if staged is None:
                return values
            staged.storage[: len(values)] = values
        out = list(staged.storage) if staged is not None else list(values)
        if len(values) > self.limit:
            self.pool.free(staged)
        return out

    def clip_and_sum(self, values: List[float]) -> float:
        n = len(values)
        staged = self.pool.alloc(n) if n > self.limit else None  # leak: n is clipped before the test that guards the free
        n = min(n, self.limit)
        if staged is not None:
            staged.storage[:n] = values[:n]
        total = sum(values[:n])
        if n > self.limit:
            self.pool.free(staged)
        return total


class DoubleBuffer:
    """Current and next staging buffer of a layer-by-layer prefetch."""

    def __init__(self, pool: PinnedPool, numel: int) -> None:
        self.pool = pool
        self.numel = numel
        self.cur: Optional[PinnedBuffer] = None
        self.nxt: Optional[PinnedBuffer] = None

    def rotate(self) -> bool:
        self.cur = self.nxt
        self.nxt = self.pool.alloc(self.numel)  # leak: two rotations later it is overwritten in cur without free
        return self.cur is not None

    def close(self) -> None:
        for buf in (self.cur, self.nxt):
            if buf is not None:
                self.pool.free(buf)
        self.cur = self.nxt = None


class TripleBuffer(DoubleBuffer):
    def rotate(self) -> bool:
        if self.cur is not None:
            self.pool.free(self.cur)
        self.cur = self.nxt
        self.nxt = self.pool.alloc(self.numel)  # clean: near miss, cur is freed before it is replaced
        return self.cur is not None


class SavedTensors:
    """Pack and unpack hooks for activations; every packed handle is unpacked once in backward."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._saved: Dict[int, PinnedBuffer] = {}
        self._next = 0

    def pack(self, values: List[float]) -> Any:
        buf = self.pool.alloc(len(values))  # clean: stored under its handle, unpack frees it
        if buf is None:
            return values
        buf.storage[: len(values)] = values
        handle = self._next
        self._next += 1
        self._saved[handle] = buf
        return handle

    def unpack(self, packed: Any) -> List[float]:
        if not isinstance(packed, int):
            return packed
        buf = self._saved.pop(packed)
        values = list(buf.storage)
        self.pool.free(buf)
        return values

    def hooks(self) -> Any:
        if torch is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def main() -> None:
    pool, streams = PinnedPool(64), StreamPool(2)
    off = ParamOffloader(pool, streams)
    assert off.offload("w", [1.0, 2.0]) and off.offload("w", [3.0, 4.0])
    assert off.fetch("w") == [3.0, 4.0]
    assert off.round_trip([1.0] * 6) == [1.0] * 6
    buffers = TripleBuffer(pool, 4)
    for _ in range(5):
        buffers.rotate()
    buffers.close()
    saved = SavedTensors(pool)
    assert saved.unpack(saved.pack([1.0, 2.0])) == [1.0, 2.0]  # clean: unpacked by the call around it
    assert pool.budget == 64 and len(streams) == 2


if __name__ == "__main__":
    main()
