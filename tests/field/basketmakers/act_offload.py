"""Activation offload for pipeline stages: arenas per microbatch, saved-tensor hooks, prefetch."""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Iterator, Optional

import torch

log = logging.getLogger("offload")


@dataclass(frozen=True)
class Extent:
    arena: "Arena"
    start: int
    size: int


class Arena:
    """First fit over one host tensor; carve() gives None if there is no hole."""

    def __init__(self, nbytes: int):
        self.store = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.holes: list[tuple[int, int]] = [(0, nbytes)]

    def carve(self, size: int) -> Optional[Extent]:
        for i, (start, length) in enumerate(self.holes):
            if length >= size:
                if length == size:
                    self.holes.pop(i)
                else:
                    self.holes[i] = (start + size, length - size)
                return Extent(self, start, size)
        return None

    def mend(self, e: Extent) -> None:
        self.holes.append((e.start, e.size))
        self.holes.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self.holes:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.holes = merged

    def bytes_of(self, e: Extent) -> torch.Tensor:
        return self.store[e.start:e.start + e.size]


class TieredArena:
    """A fast arena with a slow one behind it."""

    def __init__(self, fast: Arena, slow: Arena):
        self.fast = fast
        self.slow = slow

    def carve(self, size: int) -> Optional[Extent]:
        return self.fast.carve(size) or self.slow.carve(size)  # clean: whichever is got is returned

    def mend(self, e: Extent) -> None:
        e.arena.mend(e)

    def carve_aligned(self, size: int, align: int) -> Optional[Extent]:
        e = self.fast.carve(size)  # leak: a misaligned extent of the fast arena is replaced by one of the slow
        if e is None or e.start % align:
            e = self.slow.carve(size)  # clean: returned to the caller
        return e

    def carve_strict(self, size: int, align: int) -> Optional[Extent]:
        e = self.fast.carve(size)  # clean: near miss, mended before it is replaced
        if e is not None and e.start % align:
            self.fast.mend(e)
            e = None
        return e or self.slow.carve(size)  # clean: returned to the caller

    def promote(self, e: Extent) -> Extent:
        if e.arena is self.fast:
            return e
        up = self.fast.carve(e.size)  # clean: returned in the place of e, which is mended
        if up is None:
            return e
        self.fast.bytes_of(up).copy_(self.slow.bytes_of(e))
        self.slow.mend(e)
        return up


class SavedTensor:
    def __init__(self, extent: Optional[Extent], tensor: Optional[torch.Tensor], shape, dtype):
        self.extent = extent
        self.tensor = tensor
        self.shape = shape
        self.dtype = dtype


class OffloadHooks:
    def __init__(self, arena: TieredArena, min_bytes: int = 1 << 20):
        self.arena = arena
        self.min_bytes = min_bytes
        self.live: dict[int, SavedTensor] = {}
        self._lock = threading.Lock()

    def pack(self, t: torch.Tensor) -> SavedTensor:
        if t.nbytes < self.min_bytes:
            return SavedTensor(None, t, t.shape, t.dtype)
        e = self.arena.carve(t.nbytes)  # clean: near miss, moved into live, unpack() mends it
        if e is None:
            return SavedTensor(None, t, t.shape, t.dtype)
        e.arena.bytes_of(e).copy_(t.view(torch.uint8).flatten())
        saved = SavedTensor(e, None, t.shape, t.dtype)
        self.live[id(saved)] = saved
        return saved

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        if saved.extent is None:
            return saved.tensor
        raw = saved.extent.arena.bytes_of(saved.extent).cuda()
        self.live.pop(id(saved), None)
        self.arena.mend(saved.extent)
        saved.extent, saved.tensor = None, raw.view(saved.dtype).view(saved.shape)
        return saved.tensor

    def pack_compressed(self, t: torch.Tensor) -> Optional[Extent]:
        e = self.arena.carve(t.nbytes // 2)  # leak: amax over the range falls back to None with the extent carved
        if e is None:
            return None
        if float(t.abs().max()) > 65504.0:
            log.debug("range too wide for half")
            return None
        e.arena.bytes_of(e).copy_(t.half().view(torch.uint8).flatten())
        return e

    def measure(self, t: torch.Tensor) -> float:
        e = self.arena.carve(t.nbytes)  # leak: the early return for non-contiguous t is before mend()
        if e is None:
            return 0.0
        if not t.is_contiguous():
            return -1.0
        ev0, ev1 = torch.cuda.Event(True), torch.cuda.Event(True)
        ev0.record()
        e.arena.bytes_of(e).copy_(t.view(torch.uint8).flatten())
        ev1.record()
        ev1.synchronize()
        self.arena.mend(e)
        return ev0.elapsed_time(ev1)


class StagePrefetch:
    def __init__(self, arena: TieredArena, depth: int):
        self.arena = arena
        self.depth = depth
        self.queue: deque[tuple[int, Extent]] = deque()

    def ahead(self, sizes: list[int]) -> Iterator[int]:
        for mb, size in enumerate(sizes):
            e = self.arena.carve(size)  # clean: near miss, drained by popleft here and by flush()
            if e is None:
                break
            self.queue.append((mb, e))
            if len(self.queue) > self.depth:
                done, old = self.queue.popleft()
                self.arena.mend(old)
                yield done

    def flush(self) -> None:
        while self.queue:
            self.arena.mend(self.queue.popleft()[1])

    def windows(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        for size in sizes:
            e = self.arena.carve(size)  # leak: a consumer that stops early closes the generator before mend()
            if e is None:
                return
            yield e.arena.bytes_of(e)
            self.arena.mend(e)

    def reserve_pair(self, a: int, b: int) -> Optional[tuple[Extent, Extent]]:
        first = self.arena.carve(a)  # leak: not mended when the second cannot be carved
        second = self.arena.carve(b)  # leak: not mended when the first could not be carved
        if first is None or second is None:
            return None
        return first, second
