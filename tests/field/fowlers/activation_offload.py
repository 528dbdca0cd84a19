"""Activations offloaded to pinned host memory between forward and backward."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Optional

import torch

GRAIN = 1 << 16


@dataclass(eq=False)
class Slab:
    index: int
    nbytes: int
    data: torch.Tensor

    def typed(self, like: torch.Tensor) -> torch.Tensor:
        return self.data[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


class HostSlabs:
    """Pinned slabs in size classes. grab() answers None when the class is used up."""

    def __init__(self, classes: dict[int, int]) -> None:
        self._lock = threading.Lock()
        self._shelves: dict[int, list[Slab]] = {}
        serial = 0
        for nbytes, count in sorted(classes.items()):
            shelf = []
            for _ in range(count):
                shelf.append(Slab(serial, nbytes, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)))
                serial += 1
            self._shelves[nbytes] = shelf

    def grab(self, nbytes: int) -> Optional[Slab]:
        want = -(-nbytes // GRAIN) * GRAIN
        with self._lock:
            for size, shelf in self._shelves.items():
                if size >= want and shelf:
                    return shelf.pop()
        return None

    def drop(self, slab: Slab) -> None:
        with self._lock:
            self._shelves[slab.nbytes].append(slab)

    def drop_all(self, slabs: Iterable[Slab]) -> None:
        for slab in slabs:
            self.drop(slab)


def size_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


@dataclass
class Parked:
    slab: Slab
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class OffloadHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, slabs: HostSlabs, threshold: int) -> None:
        self.slabs, self.threshold = slabs, threshold
        self.bytes_out = 0

    def pack(self, t: torch.Tensor) -> Any:
        if size_of(t) < self.threshold:
            return t
        slab = self.slabs.grab(size_of(t))  # clean: near miss, kept in the packed object, unpack drops it
        if slab is None:
            return t
        slab.typed(t).copy_(t, non_blocking=True)
        self.bytes_out += size_of(t)
        return Parked(slab, t.shape, t.dtype, t.device)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
        out.copy_(packed.slab.typed(out))
        self.slabs.drop(packed.slab)
        return out


class PrefetchingHooks:
    """As OffloadHooks, but the next layer's activations are copied back ahead of time."""

    def __init__(self, slabs: HostSlabs) -> None:
        self.slabs = slabs
        self._serial = 0
        self._parked: dict[int, Parked] = {}
        self._ready: dict[int, torch.Tensor] = {}

    def pack(self, t: torch.Tensor) -> Any:
        slab = self.slabs.grab(size_of(t))  # leak: unpack of a prefetched one does not drop the slab
        if slab is None:
            return t
        slab.typed(t).copy_(t, non_blocking=True)
        self._serial += 1
        self._parked[self._serial] = Parked(slab, t.shape, t.dtype, t.device)
        return self._serial

    def prefetch(self, upto: int) -> None:
        for key, parked in self._parked.items():
            if key >= upto and key not in self._ready:
                out = torch.empty(parked.shape, dtype=parked.dtype, device=parked.device)
                self._ready[key] = out.copy_(parked.slab.typed(out), non_blocking=True)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        parked = self._parked.pop(packed)
        if packed in self._ready:
            return self._ready.pop(packed)
        out = torch.empty(parked.shape, dtype=parked.dtype, device=parked.device)
        out.copy_(parked.slab.typed(out))
        self.slabs.drop(parked.slab)
        return out


def offload_many(slabs: HostSlabs, tensors: list[torch.Tensor]) -> list[Slab]:
    """Slabs for as many tensors as there is room for, in order."""
    out: list[Slab] = []
    for t in tensors:
        slab = slabs.grab(size_of(t))  # clean: handed on in the list
        if slab is None:
            break
        slab.typed(t).copy_(t)
        out.append(slab)
    return out


def offload_or_nothing(slabs: HostSlabs, tensors: list[torch.Tensor]) -> Optional[list[Slab]]:
    held = offload_many(slabs, tensors)  # leak: a partial list is given up for None
    if len(held) < len(tensors):
        return None
    for t in tensors:
        t.untyped_storage().resize_(0)
    return held


def offload_or_rollback(slabs: HostSlabs, tensors: list[torch.Tensor]) -> Optional[list[Slab]]:
    held = offload_many(slabs, tensors)  # clean: near miss, rolled back when partial, else handed on
    if len(held) < len(tensors):
        slabs.drop_all(held)
        return None
    for t in tensors:
        t.untyped_storage().resize_(0)
    return held


def swap_out_pair(slabs: HostSlabs, weight: torch.Tensor, grad: torch.Tensor) -> Optional[tuple[Slab, Slab]]:
    first = slabs.grab(size_of(weight))  # leak: not dropped when there is no room for the gradient
    if first is None:
        return None
    second = slabs.grab(size_of(grad))  # clean: handed on in the pair
    if second is None:
        return None
    first.typed(weight).copy_(weight)
    second.typed(grad).copy_(grad)
    return first, second


def swap_out_moments(slabs: HostSlabs, m: torch.Tensor, v: torch.Tensor) -> Optional[tuple[Slab, Slab]]:
    first = slabs.grab(size_of(m))  # clean: dropped when the second one fails
    second = slabs.grab(size_of(v))  # clean: dropped when the first one fails
    if first is None or second is None:
        slabs.drop_all(s for s in (first, second) if s is not None)
        return None
    first.typed(m).copy_(m)
    second.typed(v).copy_(v)
    return first, second


def hold_outputs(slabs: HostSlabs, layers: list[Callable], micro: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs all micro batches, keeps each layer's output on the host for the recomputation check."""
    stash: dict[int, Slab] = {}
    outs = []
    for x in micro:
        for i, layer in enumerate(layers):
            x = layer(x)
            slab = slabs.grab(size_of(x))  # leak: the next micro batch overwrites the layer's entry
            if slab is not None:
                slab.typed(x).copy_(x)
                stash[i] = slab
        outs.append(x)
    slabs.drop_all(stash.values())
    return outs


class CopyEngine:
    """Device to host copies on a side thread, a limited number at a time."""

    def __init__(self, depth: int, submit: Callable[[Callable[[], None]], Any]) -> None:
        self._depth = threading.BoundedSemaphore(depth)
        self._submit = submit

    def copy_out(self, src: torch.Tensor, slab: Slab, on_done: Callable[[Slab], None]) -> None:
        self._depth.acquire()  # clean: near miss, the job releases it in its finally

        def job() -> None:
            try:
                slab.typed(src).copy_(src)
            finally:
                self._depth.release()
            on_done(slab)

        self._submit(job)

    def try_copy_out(self, src: torch.Tensor, slab: Slab) -> bool:
        if not self._depth.acquire(blocking=False):  # leak: the small tensor's return keeps the permit
            return False
        if size_of(src) < GRAIN:
            slab.typed(src).copy_(src)
            return True

        def job() -> None:
            try:
                slab.typed(src).copy_(src)
            finally:
                self._depth.release()

        self._submit(job)
        return True


def mirror(engine: CopyEngine, slabs: HostSlabs, tensors: list[torch.Tensor]) -> int:
    sent = 0
    for t in tensors:
        slab = slabs.grab(size_of(t))  # clean: near miss, the engine's callback drops it
        if slab is None:
            continue
        engine.copy_out(t, slab, slabs.drop)
        sent += 1
    return sent
