"""Expert-parallel dispatch/combine over a symmetric heap (NVSHMEM-flavoured, one heap per PE)."""
from __future__ import annotations

import bisect
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    off: int
    nbytes: int


class Team(NamedTuple):
    tid: int
    pes: tuple[int, ...]


class SymHeap:
    ALIGN = 256

    def __init__(self, nbytes: int, device: torch.device | str = "cuda", max_teams: int = 16):
        self.base = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._holes: list[Span] = [Span(0, nbytes)]
        self._team_ids = list(range(max_teams))

    def malloc(self, nbytes: int) -> Span | None:
        want = -(-nbytes // self.ALIGN) * self.ALIGN
        for i, h in enumerate(self._holes):
            if h.nbytes >= want:
                if h.nbytes == want:
                    del self._holes[i]
                else:
                    self._holes[i] = Span(h.off + want, h.nbytes - want)
                return Span(h.off, want)
        return None

    def mfree(self, s: Span) -> None:
        i = bisect.bisect(self._holes, s)
        self._holes.insert(i, s)
        merged: list[Span] = []
        for h in self._holes:
            if merged and merged[-1].off + merged[-1].nbytes == h.off:
                merged[-1] = Span(merged[-1].off, merged[-1].nbytes + h.nbytes)
            else:
                merged.append(h)
        self._holes = merged

    def team_split(self, pes: tuple[int, ...]) -> Team | None:
        if not self._team_ids:
            return None
        return Team(self._team_ids.pop(0), pes)

    def team_destroy(self, t: Team) -> None:
        self._team_ids.append(t.tid)

    def view(self, s: Span, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        n = torch.empty(0, dtype=dtype).element_size()
        for d in shape:
            n *= d
        return self.base[s.off : s.off + n].view(dtype).view(shape)


class A2ABuffers:
    def __init__(self, heap: SymHeap, hidden: int, dtype: torch.dtype):
        self.heap = heap
        self.hidden = hidden
        self.dtype = dtype
        self.itemsize = torch.empty(0, dtype=dtype).element_size()
        self.scratch: Span | None = None
        self.meta: Span | None = None
        self.meta_rows = 0

    def ensure_scratch(self, rows: int) -> bool:
        need = rows * self.hidden * self.itemsize
        if self.scratch is not None and self.scratch.nbytes >= need:
            return True
        span = self.heap.malloc(need)  # leak: a grown scratch replaces the smaller one, which is never freed
        if span is None:
            return False
        self.scratch = span
        return True

    def ensure_meta(self, rows: int) -> bool:
        if rows <= self.meta_rows:
            return True
        if self.meta is not None:
            self.heap.mfree(self.meta)
            self.meta, self.meta_rows = None, 0
        self.meta = self.heap.malloc(rows * 16)  # clean: near miss, the smaller span was freed just before
        if self.meta is None:
            return False
        self.meta_rows = rows
        return True

    def finalize(self) -> None:
        for name in ("scratch", "meta"):
            s = getattr(self, name)
            if s is not None:
                self.heap.mfree(s)
                setattr(self, name, None)


class Topology:
    def __init__(self, heap: SymHeap, npes: int, per_node: int):
        self.heap = heap
        self.npes = npes
        self.per_node = per_node
        self._intra: dict[int, Team] = {}
        self._inter: dict[int, Team] = {}

    def intra(self, node: int) -> Team | None:
        t = self._intra.get(node)
        if t is None:
            lo = node * self.per_node
            t = self.heap.team_split(tuple(range(lo, lo + self.per_node)))  # clean: near miss, cached and destroyed in finalize
            if t is not None:
                self._intra[node] = t
        return t

    def rail(self, lane: int) -> Team | None:
        t = self._inter.get(lane)
        if t is None:
            t = self.heap.team_split(tuple(range(lane, self.npes, self.per_node)))  # leak: finalize goes through the intra teams only
            if t is not None:
                self._inter[lane] = t
        return t

    def finalize(self) -> None:
        while self._intra:
            _, t = self._intra.popitem()
            self.heap.team_destroy(t)
        self._inter.clear()


class Dispatched:
    __slots__ = ("send", "recv", "rows", "order")

    def __init__(self, send: Span, recv: Span, rows: int, order: Tensor):
        self.send, self.recv, self.rows, self.order = send, recv, rows, order


def dispatch(bufs: A2ABuffers, x: Tensor, expert: Tensor, put_a2a, cap: int) -> Dispatched | None:
    heap, row = bufs.heap, bufs.hidden * bufs.itemsize
    send = heap.malloc(x.shape[0] * row)  # clean: near miss, freed when there is no receive span, otherwise in the handle
    if send is None:
        return None
    recv = heap.malloc(cap * row)  # clean: handed over in the handle
    if recv is None:
        heap.mfree(send)
        return None
    order = expert.argsort(stable=True)
    heap.view(send, bufs.dtype, tuple(x.shape)).copy_(x[order])
    rows = put_a2a(send, recv, expert.bincount())
    return Dispatched(send, recv, rows, order)


def combine(bufs: A2ABuffers, d: Dispatched, out: Tensor, put_a2a) -> Tensor:
    heap = bufs.heap
    put_a2a(d.recv, d.send, None)
    back = heap.view(d.send, bufs.dtype, (d.order.numel(), bufs.hidden))
    out[d.order] = back
    heap.mfree(d.recv)
    heap.mfree(d.send)
    return out


def moe_forward(bufs: A2ABuffers, x: Tensor, router, experts, put_a2a) -> Tensor:
    expert, gate = router(x)
    h = dispatch(bufs, x, expert, put_a2a, cap=2 * x.shape[0])  # leak: ranks that receive no rows return without a combine
    if h is None:
        return x
    if h.rows == 0:
        return x
    y = bufs.heap.view(h.recv, bufs.dtype, (h.rows, bufs.hidden))
    y.copy_(experts(y))
    return combine(bufs, h, torch.empty_like(x), put_a2a) * gate


def moe_forward_dense(bufs: A2ABuffers, x: Tensor, expert: Tensor, experts, put_a2a) -> Tensor:
    h = dispatch(bufs, x, expert, put_a2a, cap=x.shape[0])  # clean: near miss, the empty case skips the experts and still combines
    if h is None:
        return experts(x)
    if h.rows > 0:
        y = bufs.heap.view(h.recv, bufs.dtype, (h.rows, bufs.hidden))
        y.copy_(experts(y))
    return combine(bufs, h, torch.empty_like(x), put_a2a)


def exchange_counts(heap: SymHeap, counts: Tensor, put_counts) -> Tensor | None:
    cap = counts.numel() * 8
    for _ in range(4):
        span = heap.malloc(cap)  # leak: an attempt that overflows goes round again with a bigger span and drops this one
        if span is None:
            return None
        if put_counts(span, counts):
            got = heap.view(span, torch.int64, (cap // 8,)).clone()
            heap.mfree(span)
            return got
        cap *= 2
    return None
