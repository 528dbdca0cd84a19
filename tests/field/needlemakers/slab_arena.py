"""Slab arena over one big device allocation.

Spans are carved by size class; a scope can rewind everything carved since it
was opened. Weights loaders use it directly, layers through `LayerScratch`.
"""
from __future__ import annotations

import bisect
import logging
from contextlib import contextmanager
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

CLASSES = [1 << p for p in range(12, 28)]


class Span(NamedTuple):
    offset: int
    size: int


class OutOfArena(MemoryError):
    pass


class SlabArena:
    def __init__(self, nbytes: int, device: str = "cuda"):
        self.store = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.top = 0
        self.limit = nbytes
        self._bins: dict[int, list[Span]] = {c: [] for c in CLASSES}

    @staticmethod
    def _class(nbytes: int) -> int:
        i = bisect.bisect_left(CLASSES, nbytes)
        if i == len(CLASSES):
            raise OutOfArena(nbytes)
        return CLASSES[i]

    def carve(self, nbytes: int) -> Span:
        size = self._class(nbytes)
        if self._bins[size]:
            return self._bins[size].pop()  # clean: returned to the caller
        if self.top + size > self.limit:
            raise OutOfArena(nbytes)
        span = Span(self.top, size)
        self.top += size
        return span

    def carve_largest(self, nbytes: int) -> Span | None:
        """Any recycled span that is large enough, largest class first."""
        for size in reversed(CLASSES):
            if size < nbytes:
                return None
            if self._bins[size]:
                return self._bins[size].pop()  # clean: returned to the caller
        return None

    def split(self, nbytes: int) -> Span | None:
        """Takes a recycled span of the next class and halves it."""
        size = self._class(nbytes)
        if size * 2 not in self._bins or not self._bins[size * 2]:
            return None
        whole = self._bins[size * 2].pop()  # leak: upper half is not put in its bin
        return Span(whole.offset, size)

    def reclaim(self, span: Span) -> None:
        self._bins[span.size].append(span)

    def tensor(self, span: Span, shape, dtype) -> torch.Tensor:
        n = torch.empty((), dtype=dtype).element_size()
        for s in shape:
            n *= s
        return self.store[span.offset:span.offset + n].view(dtype).view(shape)

    @contextmanager
    def scope(self):
        taken: list[Span] = []
        try:
            yield taken
        finally:
            while taken:
                self.reclaim(taken.pop())


class LayerScratch:
    """Scratch tensors of one layer; wraps the arena."""

    def __init__(self, arena: SlabArena):
        self.arena = arena
        self.spans: dict[str, Span] = {}

    def get(self, name: str, nbytes: int) -> Span:
        span = self.spans.get(name)
        if span is not None and span.size >= nbytes:
            return span
        span = self.arena.carve(nbytes)  # leak: a smaller span of the name is replaced without reclaim
        self.spans[name] = span
        return span

    def grow(self, name: str, nbytes: int) -> Span:
        span = self.spans.pop(name, None)
        if span is not None:
            if span.size >= nbytes:
                self.spans[name] = span
                return span
            self.arena.reclaim(span)
        span = self.arena.carve(nbytes)  # clean: near miss, the smaller one is reclaimed first, reset reclaims the rest
        self.spans[name] = span
        return span

    def reset(self) -> None:
        for span in self.spans.values():
            self.arena.reclaim(span)
        self.spans.clear()


class OwnedTensor:
    """Tensor with optional ownership of its span."""

    def __init__(self, arena, span, shape, dtype, owns):
        self.arena = arena
        self.span = span
        self.owns = owns
        self.data = arena.tensor(span, shape, dtype)

    def drop(self):
        if self.owns and self.span is not None:
            self.arena.reclaim(self.span)
            self.span = None


def load_weight(arena: SlabArena, meta: dict, read) -> OwnedTensor | None:
    span = arena.carve(meta["nbytes"])  # leak: a short read returns None with the span carved
    t = arena.tensor(span, meta["shape"], torch.float16)
    if read(meta["name"], t) < meta["nbytes"]:
        log.error("short read of %s", meta["name"])
        return None
    return OwnedTensor(arena, span, meta["shape"], torch.float16, owns=True)


def load_all(arena: SlabArena, metas: list[dict], read) -> dict[str, OwnedTensor]:
    out: dict[str, OwnedTensor] = {}
    try:
        for meta in metas:
            span = arena.carve(meta["nbytes"])  # clean: near miss, owned by the tensor in out, which the handler drops
            out[meta["name"]] = OwnedTensor(arena, span, meta["shape"], torch.float16, owns=True)
            read(meta["name"], out[meta["name"]].data)
    except (OSError, OutOfArena):
        for t in out.values():
            t.drop()
        raise
    return out


def dequant_owned(arena: SlabArena, packed: torch.Tensor, scale: torch.Tensor) -> OwnedTensor:
    span = arena.carve(packed.numel() * 2)  # leak: handed to a tensor that is told it does not own the span
    t = OwnedTensor(arena, span, packed.shape, torch.float16, owns=False)
    t.data.copy_(packed).mul_(scale)
    return t


def gated(arena: SlabArena, x: torch.Tensor, up, gate) -> torch.Tensor:
    with arena.scope() as taken:
        a = arena.carve(x.shape[0] * up.shape[0] * 2)  # clean: scope
        taken.append(a)
        b = arena.carve(x.shape[0] * gate.shape[0] * 2)  # leak: carved inside the scope but not added to its list
        u = arena.tensor(a, (x.shape[0], up.shape[0]), x.dtype)
        g = arena.tensor(b, (x.shape[0], gate.shape[0]), x.dtype)
        torch.matmul(x, up.t(), out=u)
        torch.matmul(x, gate.t(), out=g)
        return torch.nn.functional.silu(g) * u


def sort_tokens(arena: SlabArena, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    span = arena.carve_largest(ids.numel() * 8)  # clean: near miss, replaced only when it is None
    if span is None:
        span = arena.carve(ids.numel() * 8)  # clean: finally
    try:
        keys = arena.tensor(span, ids.shape, torch.int64)
        keys.copy_(experts).mul_(1 << 32).add_(ids)
        return keys.sort().values & 0xFFFFFFFF
    finally:
        arena.reclaim(span)


def moe_buffers(arena: SlabArena, tokens: int, dim: int, experts: int) -> list[Span]:
    spans: list[Span] = []
    try:
        for _ in range(experts):
            spans.append(arena.carve(tokens * dim * 2))  # clean: near miss, reclaimed when the arena runs out, else the caller's
    except OutOfArena:
        for s in spans:
            arena.reclaim(s)
        raise
    return spans


def moe_forward(arena: SlabArena, x: torch.Tensor, experts: list) -> torch.Tensor:
    spans = moe_buffers(arena, x.shape[0], x.shape[1], len(experts))  # clean: reclaimed in the loop
    out = torch.zeros_like(x)
    for span, expert in zip(spans, experts):
        buf = arena.tensor(span, x.shape, torch.float16)
        buf.copy_(x)
        out += expert(buf)
        arena.reclaim(span)
    return out
