"""Device arenas for optimizer and gradient shards, wrapped for accounting and for teams of ranks."""
from __future__ import annotations

import bisect
import threading
import weakref
from typing import NamedTuple

import torch


class Span(NamedTuple):
    off: int
    size: int


class Arena:
    """First-fit arena over one flat tensor; ``carve`` gives a Span, ``mend`` takes it back."""

    def __init__(self, nbytes: int, device: str = "cuda"):
        self.base = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._holes: list[tuple[int, int]] = [(0, nbytes)]

    def carve(self, size: int) -> Span | None:
        for i, (off, room) in enumerate(self._holes):
            if room >= size:
                if room == size:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + size, room - size)
                return Span(off, size)
        return None

    def mend(self, span: Span) -> None:
        bisect.insort(self._holes, (span.off, span.size))
        merged: list[tuple[int, int]] = []
        for off, room in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((off, room))
        self._holes = merged

    def view(self, span: Span) -> torch.Tensor:
        return self.base[span.off : span.off + span.size]


class AccountedArena:
    """Adds a limit and a high water mark to an arena."""

    def __init__(self, inner: Arena, limit: int):
        self.inner = inner
        self.limit = limit
        self.used = 0
        self.peak = 0

    def carve(self, size: int) -> Span | None:
        span = self.inner.carve(size)  # leak: dropped when the limit is exceeded
        if span is None:
            return None
        if self.used + span.size > self.limit:
            return None
        self.used += span.size
        self.peak = max(self.peak, self.used)
        return span

    def carve_strict(self, size: int) -> Span:
        span = self.inner.carve(size)  # clean: near miss, mended before the MemoryError
        if span is None:
            raise MemoryError(f"arena has no hole of {size} bytes")
        if self.used + span.size > self.limit:
            self.inner.mend(span)
            raise MemoryError(f"limit of {self.limit} bytes")
        self.used += span.size
        self.peak = max(self.peak, self.used)
        return span

    def mend(self, span: Span) -> None:
        self.used -= span.size
        self.inner.mend(span)

    def view(self, span: Span) -> torch.Tensor:
        return self.inner.view(span)


class LockedArena:
    """Serialises an arena for the threads of the checkpoint writer."""

    def __init__(self, inner):
        self.inner = inner
        self._mu = threading.Lock()

    def carve(self, size: int) -> Span | None:
        with self._mu:
            return self.inner.carve(size)  # clean: returned to the caller

    def carve_wait(self, size: int, rounds: int) -> Span | None:
        self._mu.acquire()  # leak: the mutex stays held when no round finds a hole
        for _ in range(rounds):
            span = self.inner.carve(size)  # clean: returned to the caller as soon as it is not None
            if span is not None:
                self._mu.release()
                return span
        return None

    def mend(self, span: Span) -> None:
        with self._mu:
            self.inner.mend(span)

    def view(self, span: Span) -> torch.Tensor:
        return self.inner.view(span)


class TensorArena:
    """Typed tensors out of a byte arena. Tensors are known by their address."""

    def __init__(self, arena):
        self.arena = arena
        self._spans: dict[int, Span] = {}

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        size = torch.Size(shape).numel() * dtype.itemsize
        span = self.arena.carve(size)  # clean: recorded in _spans, which discard() pops
        if span is None:
            return None
        t = self.arena.view(span).view(dtype).view(shape).zero_()
        self._spans[t.data_ptr()] = span
        return t

    def discard(self, t: torch.Tensor) -> None:
        self.arena.mend(self._spans.pop(t.data_ptr()))

    def zeros_aligned(self, n: int, dtype: torch.dtype, align: int) -> torch.Tensor | None:
        span = self.arena.carve(n * dtype.itemsize)  # leak: a misaligned span is not mended before the second try
        if span is not None and span.off % align:
            span = self.arena.carve(n * dtype.itemsize + align)  # clean: recorded in _spans, which discard() pops
        if span is None:
            return None
        skip = -span.off % align
        t = self.arena.view(span)[skip : skip + n * dtype.itemsize].view(dtype).zero_()
        self._spans[t.data_ptr()] = span
        return t


class OptimizerShard:
    def __init__(self, tensors: TensorArena, numel: int):
        self.tensors = tensors
        self.numel = numel
        self.exp_avg: torch.Tensor | None = None
        self.exp_avg_sq: torch.Tensor | None = None

    def materialize(self) -> bool:
        if self.exp_avg is not None:
            return True
        a = self.tensors.zeros((self.numel,), torch.float32)  # clean: discarded when b is missing, else kept until drop()
        if a is None:
            return False
        b = self.tensors.zeros((self.numel,), torch.float32)  # clean: kept with a until drop()
        if b is None:
            self.tensors.discard(a)
            return False
        self.exp_avg, self.exp_avg_sq = a, b
        return True

    def drop(self) -> None:
        if self.exp_avg is not None:
            self.tensors.discard(self.exp_avg)
            self.tensors.discard(self.exp_avg_sq)
        self.exp_avg = self.exp_avg_sq = None

    def update(self, grad: torch.Tensor, lr: float, clip: float | None) -> torch.Tensor | None:
        step = self.tensors.zeros((self.numel,), torch.float32)  # leak: not discarded when the gradient norm is not finite
        if step is None:
            return None
        torch.mul(grad, -lr, out=step)
        if clip is not None:
            norm = step.norm()
            if not torch.isfinite(norm):
                return None
            step.mul_(clip / max(clip, norm.item()))
        out = step.clone()
        self.tensors.discard(step)
        return out

    def snapshot(self, into: dict[str, torch.Tensor]) -> bool:
        tmp = self.tensors.zeros((self.numel,), torch.float32)  # clean: near miss, the finalizer of the copy discards it
        if tmp is None:
            return False
        copy = tmp.copy_(self.exp_avg).cpu()
        weakref.finalize(copy, self.tensors.discard, tmp)
        into["exp_avg"] = copy
        return True


def gather_shards(tensors: TensorArena, shards: list[OptimizerShard]) -> torch.Tensor | None:
    parts: list[torch.Tensor] = []
    for s in shards:
        part = tensors.zeros((s.numel,), torch.float32)  # leak: the parts made before a missing one are not discarded
        if part is None:
            return None
        part.copy_(s.exp_avg)
        parts.append(part)
    out = torch.cat(parts).cpu()
    for p in parts:
        tensors.discard(p)
    return out
