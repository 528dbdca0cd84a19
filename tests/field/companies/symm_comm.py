"""Tensor-parallel collectives on symmetric memory segments."""
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generator, Iterable, List, Optional, Tuple

import torch
import torch.distributed as dist


@dataclass
class Segment:
    offset: int
    nbytes: int
    epoch: int = 0


class SymmetricHeap:
    """First-fit allocator over one symmetric allocation."""

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.zeros(nbytes, dtype=torch.uint8)
        self._holes: List[Tuple[int, int]] = [(0, nbytes)]

    def malloc(self, nbytes: int) -> Optional[Segment]:
        for i, (off, size) in enumerate(self._holes):
            if size >= nbytes:
                if size == nbytes:
                    self._holes.pop(i)  # clean: exactly used by the segment
                else:
                    self._holes[i] = (off + nbytes, size - nbytes)
                return Segment(off, nbytes)
        return None

    def mfree(self, seg: Segment) -> None:
        self._holes.append((seg.offset, seg.nbytes))
        self._holes.sort()

    def best_fit(self, nbytes: int, max_waste: int) -> Optional[Segment]:
        if not self._holes:
            return None
        self._holes.sort(key=lambda h: h[1])
        for i in range(len(self._holes)):
            if self._holes[i][1] >= nbytes:
                off, size = self._holes.pop(i)  # leak: a hole that wastes too much is popped and not put back
                if size - nbytes > max_waste:
                    return None
                return Segment(off, size)
        return None

    def tensor(self, seg: Segment, dtype: torch.dtype, numel: int) -> torch.Tensor:
        raw = self.storage[seg.offset : seg.offset + seg.nbytes]
        return raw.view(dtype)[:numel]


class SymmComm:
    def __init__(self, heap: SymmetricHeap, rank: int, world: int) -> None:
        self.heap = heap
        self.rank = rank
        self.world = world
        self.epoch = 0
        self._flags = heap.malloc(4 * world)  # clean: destroy() frees it
        self._scratch: Optional[Segment] = None

    def advance(self) -> None:
        self.epoch += 1

    def destroy(self) -> None:
        if self._scratch is not None:
            self.heap.mfree(self._scratch)
            self._scratch = None
        self.heap.mfree(self._flags)

    def scratch(self, nbytes: int) -> Segment:
        if self._scratch is not None and self._scratch.nbytes < nbytes:
            self.heap.mfree(self._scratch)
            self._scratch = None
        if self._scratch is None:
            self._scratch = self.heap.malloc(nbytes)  # clean: near miss, only when none is held, destroy() frees it
        return self._scratch

    def one_shot(self, x: torch.Tensor) -> torch.Tensor:
        seg = self.heap.malloc(x.nbytes)  # clean: near miss, None falls back, else freed
        if seg is None:
            dist.all_reduce(x)
            return x
        t = self.heap.tensor(seg, x.dtype, x.numel())
        t.copy_(x.view(-1))
        dist.all_reduce(t)
        out = t.clone().view_as(x)
        self.heap.mfree(seg)
        return out

    def two_shot(self, x: torch.Tensor) -> torch.Tensor:
        src = self.heap.malloc(x.nbytes)  # leak: when the second is None the fallback forgets it
        if src is None:
            dist.all_reduce(x)
            return x
        dst = self.heap.malloc(x.nbytes)  # clean: freed with the first
        if dst is None:
            dist.all_reduce(x)
            return x
        s, d = (self.heap.tensor(seg, x.dtype, x.numel()) for seg in (src, dst))
        s.copy_(x.view(-1))
        dist.reduce_scatter_tensor(d[: x.numel() // self.world], s)
        dist.all_gather_into_tensor(s, d[: x.numel() // self.world])
        x.copy_(s.view_as(x))
        self.heap.mfree(src)
        self.heap.mfree(dst)
        return x

    @contextmanager
    def segment(self, nbytes: int) -> Generator[Segment, None, None]:
        seg = self.heap.malloc(nbytes)  # clean: freed in the finally
        if seg is None:
            raise MemoryError(nbytes)
        try:
            yield seg
        finally:
            self.heap.mfree(seg)

    @contextmanager
    def segment_if(self, cond: bool, nbytes: int) -> Generator[Optional[Segment], None, None]:
        seg = self.heap.malloc(nbytes) if cond else None  # clean: near miss, freed when there is one
        try:
            yield seg
        finally:
            if seg is not None:
                self.heap.mfree(seg)

    @contextmanager
    def epoch_segment(self, nbytes: int, epoch: int) -> Generator[Segment, None, None]:
        seg = self.heap.malloc(nbytes)  # leak: freed only while the epoch has not moved on
        seg.epoch = epoch
        try:
            yield seg
        finally:
            if self.epoch == epoch:
                self.heap.mfree(seg)

    def fused(self, xs: Iterable[torch.Tensor]) -> List[torch.Tensor]:
        outs = []
        with ExitStack() as stack:
            for x in xs:
                seg = stack.enter_context(self.segment(x.nbytes))  # clean: the stack leaves each
                t = self.heap.tensor(seg, x.dtype, x.numel())
                t.copy_(x.view(-1))
                dist.all_reduce(t)
                outs.append(t.clone().view_as(x))
        return outs

    def fused_list(self, xs: List[torch.Tensor]) -> List[torch.Tensor]:
        segs = [self.heap.malloc(x.nbytes) for x in xs]  # leak: one None among them drops the others
        if any(seg is None for seg in segs):
            return xs
        outs = []
        for seg, x in zip(segs, xs):
            t = self.heap.tensor(seg, x.dtype, x.numel())
            t.copy_(x.view(-1))
            dist.all_reduce(t)
            outs.append(t.clone().view_as(x))
        for seg in segs:
            self.heap.mfree(seg)
        return outs

    def broadcast(self, x: torch.Tensor, fast: bool) -> torch.Tensor:
        with self.segment_if(fast, x.nbytes) as seg:  # clean: context manager
            if seg is None:
                dist.broadcast(x, 0)
                return x
            t = self.heap.tensor(seg, x.dtype, x.numel())
            if self.rank == 0:
                t.copy_(x.view(-1))
            dist.broadcast(t, 0)
            return x.copy_(t.view_as(x))

    def ping(self) -> bool:
        seg = self.heap.malloc(4)  # leak: the exception for a wrong echo is raised before the free
        t = self.heap.tensor(seg, torch.int32, 1)
        t.fill_(self.rank)
        dist.broadcast(t, 0)
        if int(t) != 0:
            raise RuntimeError("echo of rank %d" % int(t))
        self.heap.mfree(seg)
        return True
