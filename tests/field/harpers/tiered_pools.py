"""Device memory in tiers: segments from the driver, chunks cut from segments, tensors out of chunks."""
from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import torch

log = logging.getLogger(__name__)

SEGMENT = 32 << 20


@dataclass
class Segment:
    base: int
    nbytes: int
    cut: int = 0
    live: int = 0


class SegmentSource:
    """The driver's side: map_segment and unmap_segment, under a bound of bytes."""

    def __init__(self, bound: int):
        self.left = bound
        self._base = 1 << 32
        self._mapped: set[int] = set()

    def map_segment(self, nbytes: int) -> Segment | None:
        if nbytes > self.left:
            return None
        self.left -= nbytes
        seg = Segment(self._base, nbytes)
        self._base += nbytes
        self._mapped.add(seg.base)
        return seg

    def unmap_segment(self, seg: Segment) -> None:
        if seg.base in self._mapped:
            self._mapped.discard(seg.base)
            self.left += seg.nbytes


class LargePool:
    """One segment per request; freed segments are kept for reuse, trim gives them back to the source."""

    def __init__(self, source: SegmentSource):
        self.source = source
        self._kept: list[Segment] = []

    def get(self, nbytes: int) -> Segment | None:
        for i, seg in enumerate(self._kept):
            if seg.nbytes >= nbytes:
                return self._kept.pop(i)
        seg = self.source.map_segment(nbytes)  # clean: returned; later kept by free and unmapped by trim
        if seg is None and self._kept:
            self.trim()
            seg = self.source.map_segment(nbytes)  # clean: near miss, the former was None
        return seg

    def free(self, seg: Segment) -> None:
        self._kept.append(seg)

    def trim(self) -> None:
        while self._kept:
            self.source.unmap_segment(self._kept.pop())


class BoundedPool:
    """As the large pool, but keeps a few segments at most."""

    def __init__(self, source: SegmentSource, keep: int):
        self.source, self.keep = source, keep
        self._kept: list[Segment] = []

    def get(self, nbytes: int) -> Segment | None:
        self._kept.sort(key=lambda s: s.nbytes)
        at = bisect.bisect_left([s.nbytes for s in self._kept], nbytes)
        if at < len(self._kept):
            return self._kept.pop(at)
        return self.source.map_segment(nbytes)  # leak: free lets a segment beyond the bound fall without unmapping

    def free(self, seg: Segment) -> None:
        if len(self._kept) < self.keep:
            self._kept.append(seg)

    def trim(self) -> None:
        for seg in self._kept:
            self.source.unmap_segment(seg)
        self._kept = []


class ChunkPool:
    """Bump allocation inside one segment; a full one goes to the list of spent segments."""

    def __init__(self, source: SegmentSource):
        self.source = source
        self.current: Segment | None = None
        self.spent: list[Segment] = []

    def chunk(self, nbytes: int) -> int | None:
        if self.current is None or self.current.cut + nbytes > self.current.nbytes:
            fresh = self.source.map_segment(max(SEGMENT, nbytes))  # clean: near miss, current goes to spent; reset unmaps both
            if fresh is None:
                return None
            if self.current is not None:
                self.spent.append(self.current)
            self.current = fresh
        addr = self.current.base + self.current.cut
        self.current.cut += nbytes
        return addr

    def reset(self) -> None:
        """Ends all the chunks at once."""
        for seg in self.spent:
            self.source.unmap_segment(seg)
        self.spent.clear()
        if self.current is not None:
            self.source.unmap_segment(self.current)
            self.current = None


class StepPool:
    """Bump allocation for one step."""

    def __init__(self, source: SegmentSource):
        self.source = source
        self.current: Segment | None = None

    def chunk(self, nbytes: int) -> int | None:
        if self.current is None or self.current.cut + nbytes > self.current.nbytes:
            fresh = self.source.map_segment(max(SEGMENT, nbytes))  # leak: a full segment is replaced, end_step only unmaps the last
            if fresh is None:
                return None
            self.current = fresh
        addr = self.current.base + self.current.cut
        self.current.cut += nbytes
        return addr

    def end_step(self) -> None:
        if self.current is not None:
            self.source.unmap_segment(self.current)
            self.current = None


@dataclass
class PooledTensor:
    size_class: int
    data: torch.Tensor
    tag: str = ""


class TensorPool:
    """Tensors by size class, with a count of those outside."""

    CLASSES = [1 << k for k in range(12, 26)]

    def __init__(self) -> None:
        self._bins: dict[int, list[PooledTensor]] = defaultdict(list)
        self.outside = 0
        self._mu = threading.Lock()

    def rent(self, numel: int, tag: str = "") -> PooledTensor:
        size = self.CLASSES[bisect.bisect_left(self.CLASSES, numel)]
        with self._mu:
            self.outside += 1
            held = self._bins[size].pop() if self._bins[size] else PooledTensor(size, torch.empty(size, device="cuda"))
        held.tag = tag
        return held

    def hand_back(self, held: PooledTensor) -> None:
        with self._mu:
            self.outside -= 1
            self._bins[held.size_class].append(held)


class ScratchUser:
    """Rents at construction; the finalizer hands back when the object goes."""

    def __init__(self, pool: TensorPool, numel: int):
        self.held = pool.rent(numel, "scratch")  # clean: near miss, handed back by weakref.finalize
        self._end = weakref.finalize(self, pool.hand_back, self.held)

    def close(self) -> None:
        self._end()


@dataclass
class StepScope:
    """Everything rented through the scope is handed back by close()."""

    pool: TensorPool
    rented: list[PooledTensor] = field(default_factory=list)
    largest: int = 0

    def rent(self, numel: int, tag: str) -> torch.Tensor:
        held = self.pool.rent(numel, tag)  # clean: near miss, in the scope's list and handed back by close
        self.rented.append(held)
        return held.data[:numel]

    def rent_like(self, other: torch.Tensor, tag: str) -> torch.Tensor:
        held = self.pool.rent(other.numel(), tag)  # leak: only put in the list when it is the largest so far
        if held.size_class > self.largest:
            self.largest = held.size_class
            self.rented.append(held)
        return held.data[: other.numel()].view_as(other)

    def close(self) -> None:
        while self.rented:
            self.pool.hand_back(self.rented.pop())


def rms_norm(pool: TensorPool, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    held = pool.rent(x.numel(), "rms")  # clean: handed back after the result is made
    sq = held.data[: x.numel()].view_as(x)
    torch.mul(x, x, out=sq)
    out = x * torch.rsqrt(sq.mean(dim=-1, keepdim=True) + eps) * weight
    pool.hand_back(held)
    return out


def stack_gates(pool: TensorPool, xs: list[torch.Tensor]) -> torch.Tensor | None:
    """Running product of the gates, ping-pong between two tensors."""
    acc: PooledTensor | None = None
    for x in xs:
        nxt = pool.rent(x.numel(), "gate")  # leak: acc is replaced by the next one without being handed back
        view = nxt.data[: x.numel()]
        view.copy_(x.flatten())
        if acc is not None:
            view.mul_(acc.data[: x.numel()])
        acc = nxt
    if acc is None:
        return None
    result = acc.data.clone()
    pool.hand_back(acc)
    return result


def serve_segments(pool: LargePool, sizes: list[int]) -> int:
    """Sum of the bytes placed; stops at the first size without memory."""
    placed: dict[int, Segment] = {}
    for i, size in enumerate(sizes):
        seg = pool.get(size)  # clean: near miss, whatever was placed is freed below, also after a break
        if seg is None:
            log.info("stopped at %d", i)
            break
        placed[i] = seg
    total = sum(s.nbytes for s in placed.values())
    while placed:
        pool.free(placed.popitem()[1])
    return total
