"""GPU workspaces: a bump arena with marks, shaped scratch, and the scopes the kernels use."""
from __future__ import annotations

import contextlib
import math
from typing import Callable, Iterator

import torch


class WorkspaceFull(MemoryError):
    pass


class Span:
    __slots__ = ("offset", "nbytes", "tag")

    def __init__(self, offset: int, nbytes: int, tag: str = "") -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.tag = tag


class Arena:
    """First fit over a list of holes, all in one allocation."""

    ALIGN = 256

    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holes: list[tuple[int, int]] = [(0, nbytes)]

    def reserve(self, nbytes: int, tag: str = "") -> Span:
        need = -(-nbytes // self.ALIGN) * self.ALIGN
        for i, (off, size) in enumerate(self.holes):
            if size >= need:
                if size == need:
                    del self.holes[i]
                else:
                    self.holes[i] = (off + need, size - need)
                return Span(off, need, tag)
        raise WorkspaceFull(f"{nbytes} bytes for {tag!r}")

    def unreserve(self, span: Span) -> None:
        self.holes.append((span.offset, span.nbytes))
        self.holes.sort()
        merged: list[tuple[int, int]] = []
        for off, size in self.holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((off, size))
        self.holes = merged

    def view(self, span: Span, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        n = math.prod(shape) * dtype.itemsize
        return self.storage[span.offset:span.offset + n].view(dtype).view(shape)


class Scope:
    """Everything reserved within the scope goes back at its end."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.spans: list[Span] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        span = self.arena.reserve(math.prod(shape) * dtype.itemsize)  # clean: near miss, kept in self.spans that __exit__ empties
        self.spans.append(span)
        return self.arena.view(span, dtype, shape)

    def __enter__(self) -> "Scope":
        return self

    def __exit__(self, et, ev, tb) -> bool:
        while self.spans:
            self.arena.unreserve(self.spans.pop())
        return False


class SplitKScratch:
    """One span for partial sums of a split-K GEMM."""

    def __init__(self, arena: Arena, splits: int, m: int, n: int) -> None:
        self.arena = arena
        self.shape = (splits, m, n)
        self.span: Span | None = None

    def __enter__(self) -> torch.Tensor:
        nbytes = math.prod(self.shape) * 4
        self.span = self.arena.reserve(nbytes, "splitk")  # leak: __exit__ returns early when the body raised
        return self.arena.view(self.span, torch.float32, self.shape)

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None:
            return False
        self.arena.unreserve(self.span)
        self.span = None
        return False


class AttnScratch:
    def __init__(self, arena: Arena, heads: int, tiles: int, lse: bool) -> None:
        self.arena = arena
        self.heads = heads
        self.tiles = tiles
        self.lse = lse
        self.out: Span | None = None
        self.aux: Span | None = None

    def __enter__(self) -> "AttnScratch":
        self.out = self.arena.reserve(self.heads * self.tiles * 512, "attn.out")  # clean: unreserved in __exit__ or below
        if self.lse:
            try:
                self.aux = self.arena.reserve(self.heads * self.tiles * 4, "attn.lse")  # clean: near miss, unreserved in __exit__ under the same flag
            except WorkspaceFull:
                self.arena.unreserve(self.out)
                raise
        return self

    def __exit__(self, et, ev, tb) -> None:
        if self.lse:
            self.arena.unreserve(self.aux)
        self.arena.unreserve(self.out)


class GroupedGemmScratch:
    def __init__(self, arena: Arena, experts: int) -> None:
        self.arena = arena
        self.experts = experts

    def __enter__(self) -> "GroupedGemmScratch":
        self.ptrs = self.arena.reserve(self.experts * 24, "ptrs")  # leak: lost when the reserve for sizes raises WorkspaceFull
        self.sizes = self.arena.reserve(self.experts * 12, "sizes")  # clean: unreserved in __exit__
        return self

    def __exit__(self, et, ev, tb) -> None:
        self.arena.unreserve(self.sizes)
        self.arena.unreserve(self.ptrs)


@contextlib.contextmanager
def reserved(arena: Arena, nbytes: int, tag: str) -> Iterator[Span]:
    span = arena.reserve(nbytes, tag)  # clean: unreserved in finally
    try:
        yield span
    finally:
        arena.unreserve(span)


@contextlib.contextmanager
def reserved_fast(arena: Arena, nbytes: int) -> Iterator[Span]:
    span = arena.reserve(nbytes, "fast")  # leak: no finally, so a body that raises skips unreserve
    yield span
    arena.unreserve(span)


class WorkspaceManager:
    """Grows one span per stream; kernels ask for at least n bytes."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.current: dict[int, Span] = {}

    def ensure(self, stream: int, nbytes: int) -> Span:
        cur = self.current.get(stream)
        if cur is not None:
            if cur.nbytes >= nbytes:
                return cur
            self.arena.unreserve(self.current.pop(stream))
        span = self.arena.reserve(nbytes, f"s{stream}")  # clean: kept in self.current, the smaller one went back
        self.current[stream] = span
        return span

    def preallocate(self, streams: list[int], nbytes: int) -> None:
        for s in streams:
            self.current[s] = self.arena.reserve(nbytes, f"s{s}")  # leak: overwrites the span of a stream that has one

    def shutdown(self) -> None:
        for span in self.current.values():
            self.arena.unreserve(span)
        self.current.clear()


def autotune(arena: Arena, sizes: list[int], bench: Callable[[Span], float | None]) -> int | None:
    best, best_t = None, math.inf
    for nbytes in sizes:
        try:
            span = arena.reserve(nbytes, "tune")  # leak: a config that bench() refuses is skipped with its span
        except WorkspaceFull:
            break
        t = bench(span)
        if t is None:
            continue
        if t < best_t:
            best, best_t = nbytes, t
        arena.unreserve(span)
    return best


def largest_fit(arena: Arena, start: int, floor: int) -> Span | None:
    nbytes = start
    while nbytes >= floor:
        try:
            return arena.reserve(nbytes, "fit")  # clean: returned to the caller, a failed try holds nothing
        except WorkspaceFull:
            nbytes //= 2
    return None


def reduce_partials(arena: Arena, parts: torch.Tensor) -> torch.Tensor:
    with Scope(arena) as ws:
        acc = ws.tensor(*parts.shape[1:], dtype=torch.float32)  # clean: the scope gives it back
        torch.sum(parts, dim=0, out=acc)
        return acc.to(parts.dtype)


def probe(arena: Arena, floor: int) -> int:
    span = largest_fit(arena, 1 << 30, floor)  # leak: only the size is returned and the span dropped
    return 0 if span is None else span.nbytes


def headroom(arena: Arena, floor: int) -> int:
    span = largest_fit(arena, 1 << 30, floor)  # clean: unreserved before the size is returned
    if span is None:
        return 0
    arena.unreserve(span)
    return span.nbytes


def with_hist(arena: Arena, ids: torch.Tensor, bins: int) -> torch.Tensor:
    with reserved(arena, bins * 8, "hist") as span:  # clean: the context manager unreserves it
        hist = arena.view(span, torch.int64, (bins,))
        hist.copy_(torch.bincount(ids, minlength=bins)[:bins])
        return hist.clone()
