"""Activation offload to pinned host memory with saved-tensor hooks."""
from __future__ import annotations

import heapq
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

log = logging.getLogger("offload")

_ALIGN = 512


def _round(nbytes: int) -> int:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


class HostSlabs:
    """Pinned byte slabs kept in per-size heaps; the lowest id is reused first."""

    def __init__(self, budget: int):
        self._mu = threading.Lock()
        self._heaps: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._ids: dict[int, int] = {}
        self._next = 0
        self.left = budget

    def obtain(self, nbytes: int) -> torch.Tensor | None:
        size = _round(nbytes)
        with self._mu:
            heap = self._heaps.get(size)
            if heap:
                _, slab = heapq.heappop(heap)  # clean: returned to the caller
                return slab
            if size > self.left:
                return None
            self.left -= size
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._ids[slab.data_ptr()] = self._next
            self._next += 1
            return slab

    def obtain_clean(self, nbytes: int) -> torch.Tensor | None:
        size = _round(nbytes)
        with self._mu:
            heap = self._heaps.get(size, [])
            while heap:
                _, slab = heapq.heappop(heap)  # leak: slabs that are not pinned any more fall out of every heap
                if slab.is_pinned():
                    return slab.zero_()
        return None

    def hand_back(self, slab: torch.Tensor) -> None:
        with self._mu:
            heap = self._heaps.setdefault(slab.numel(), [])
            heapq.heappush(heap, (self._ids[slab.data_ptr()], slab))

    def reclaim_unused(self) -> int:
        freed = 0
        with self._mu:
            for size, heap in self._heaps.items():
                while heap:
                    _, slab = heapq.heappop(heap)  # clean: near miss, the budget gets its bytes back
                    del self._ids[slab.data_ptr()]
                    self.left += size
                    freed += size
        return freed


class OffloadedTensor:
    __slots__ = ("slab", "shape", "dtype", "device", "event")

    def __init__(self, slab, like: torch.Tensor):
        self.slab = slab
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device
        self.event = None


class ActivationOffloader:
    def __init__(self, slabs: HostSlabs, min_bytes: int = 1 << 20):
        self.slabs = slabs
        self.min_bytes = min_bytes
        self.d2h = torch.cuda.Stream()
        self.h2d = torch.cuda.Stream()
        self._live: dict[int, OffloadedTensor] = {}
        self._ticket = 0
        self._workers = ThreadPoolExecutor(max_workers=2)

    # -- saved tensor hooks -----------------------------------------------------

    def pack(self, t: torch.Tensor):
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or not t.is_cuda:
            return t
        slab = self.slabs.obtain(nbytes)  # clean: near miss, owned by _live until unpack() or reset()
        if slab is None:
            return t
        item = OffloadedTensor(slab, t)
        with torch.cuda.stream(self.d2h):
            slab[:nbytes].view(t.dtype).view(t.shape).copy_(t, non_blocking=True)
            item.event = self.d2h.record_event()
        self._ticket += 1
        self._live[self._ticket] = item
        return self._ticket

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        item = self._live.pop(packed)
        out = self._fetch(item)
        self.slabs.hand_back(item.slab)
        return out

    def _fetch(self, item: OffloadedTensor) -> torch.Tensor:
        out = torch.empty(item.shape, dtype=item.dtype, device=item.device)
        nbytes = out.numel() * out.element_size()
        self.h2d.wait_event(item.event)
        with torch.cuda.stream(self.h2d):
            out.copy_(item.slab[:nbytes].view(item.dtype).view(item.shape), non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.h2d)
        return out

    def reset(self) -> None:
        for item in self._live.values():
            self.slabs.hand_back(item.slab)
        self._live.clear()

    def pack_group(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        out = []
        for t in tensors:
            slab = self.slabs.obtain(t.numel() * t.element_size())  # leak: earlier slabs of the group are dropped when one is missing
            if slab is None:
                return None
            slab[: t.numel() * t.element_size()].view(t.dtype).copy_(t.reshape(-1))
            out.append(slab)
        return out

    def pack_all(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        out: list[torch.Tensor] = []
        for t in tensors:
            slab = self.slabs.obtain(t.numel() * t.element_size())  # clean: near miss, the loop in the failing branch hands them all back
            if slab is None:
                for s in out:
                    self.slabs.hand_back(s)
                return None
            slab[: t.numel() * t.element_size()].view(t.dtype).copy_(t.reshape(-1))
            out.append(slab)
        return out

    # -- asynchronous copies ----------------------------------------------------

    def offload_later(self, t: torch.Tensor) -> Future:
        slab = self.slabs.obtain(t.numel() * t.element_size())  # clean: near miss, the done-callback hands it back
        fut = self._workers.submit(self._copy_out, t, slab)
        fut.add_done_callback(lambda _f: slab is not None and self.slabs.hand_back(slab))
        return fut

    def _copy_out(self, t: torch.Tensor, slab: torch.Tensor | None) -> int:
        if slab is None:
            return 0
        nbytes = t.numel() * t.element_size()
        slab[:nbytes].view(t.dtype).copy_(t.reshape(-1))
        return nbytes

    def measure(self, t: torch.Tensor) -> float:
        nbytes = t.numel() * t.element_size()
        slab = self.slabs.obtain(nbytes)  # leak: the worker that gets it only reads, and nobody hands it back
        started = time.perf_counter()
        self._workers.submit(self._copy_out, t, slab).result()
        return nbytes / (time.perf_counter() - started)

    def mirror(self, t: torch.Tensor) -> torch.Tensor:
        nbytes = t.numel() * t.element_size()
        slab = self.slabs.obtain(nbytes)  # leak: not handed back in the branch for tensors that are on the host
        if slab is None:
            return t.cpu()
        if not t.is_cuda:
            return t.clone()
        slab[:nbytes].view(t.dtype).copy_(t.reshape(-1))
        host = slab[:nbytes].view(t.dtype).view(t.shape).clone()
        self.slabs.hand_back(slab)
        return host

    # -- staging ----------------------------------------------------------------

    @contextmanager
    def scratch(self, nbytes: int):
        slab = self.slabs.obtain(nbytes)  # clean: handed back in finally
        if slab is None:
            raise MemoryError(f"no host slab of {nbytes} bytes")
        try:
            yield slab
        finally:
            self.slabs.hand_back(slab)

    @contextmanager
    def scratch_or_pageable(self, nbytes: int):
        slab = self.slabs.obtain(nbytes)  # leak: not in a finally, and the RuntimeError of the body is swallowed
        if slab is None:
            yield torch.empty(nbytes, dtype=torch.uint8)
            return
        try:
            yield slab
            self.slabs.hand_back(slab)
        except RuntimeError:
            log.exception("scratch user failed")

    def compare(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        n = a.numel() * a.element_size()
        with self.scratch(n) as left, self.scratch(n) as right:  # clean: both are context managers
            left[:n].view(a.dtype).copy_(a.reshape(-1))
            right[:n].view(b.dtype).copy_(b.reshape(-1))
            return bool(torch.equal(left[:n], right[:n]))
