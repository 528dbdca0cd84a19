"""Workspace arena for temporaries of a forward pass: bump allocation with marks, plus named persistent regions.

push() sets a mark and pop() goes back to it; everything taken in between goes with the mark. Regions come from
the other end of the arena and are released one by one.
"""
from __future__ import annotations

import contextlib
import logging
import typing

import torch
from torch import nn

log = logging.getLogger("workspace")

ALIGN = 256

def align(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN

class WorkspaceFull(RuntimeError):
    pass

class ShapeMismatch(ValueError):
    pass

class Region:
    def __init__(self, arena: "Arena", offset: int, nbytes: int, name: str):
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.name = name

    def tensor(self, shape, dtype) -> torch.Tensor:
        n = int(torch.Size(shape).numel()) * torch.empty((), dtype=dtype).element_size()
        if n > self.nbytes:
            raise ShapeMismatch(f"{self.name}: {n} > {self.nbytes}")
        return self.arena.storage[self.offset:self.offset + n].view(dtype).view(shape)

    def release(self) -> None:
        self.arena._release(self)

class Arena:
    def __init__(self, nbytes: int, device="cuda"):
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.low = 0
        self.high = nbytes
        self.marks: list[int] = []
        self.holes: list[tuple[int, int]] = []
        self.peak = 0

    # marks
    def push(self) -> int:
        self.marks.append(self.low)
        return len(self.marks)

    def pop(self, depth: int) -> None:
        while len(self.marks) >= depth:
            self.low = self.marks.pop()

    def temp(self, shape, dtype) -> torch.Tensor:
        n = align(int(torch.Size(shape).numel()) * torch.empty((), dtype=dtype).element_size())
        if self.low + n > self.high:
            raise WorkspaceFull(f"{n} bytes, {self.high - self.low} left")
        t = self.storage[self.low:self.low + n]
        self.low += n
        self.peak = max(self.peak, self.low)
        return t.view(dtype)[:int(torch.Size(shape).numel())].view(shape)

    @contextlib.contextmanager
    def frame(self):
        depth = self.push()  # clean: popped in finally
        try:
            yield self
        finally:
            self.pop(depth)

    # regions
    def region(self, name: str, nbytes: int) -> Region:
        nbytes = align(nbytes)
        for i, (offset, size) in enumerate(self.holes):
            if size >= nbytes:
                self.holes.pop(i)  # clean: near miss, what is left of the hole is put back
                if size > nbytes:
                    self.holes.append((offset + nbytes, size - nbytes))
                return Region(self, offset, nbytes, name)
        if self.high - nbytes < self.low:
            raise WorkspaceFull(f"region {name}: {nbytes} bytes")
        self.high -= nbytes
        return Region(self, self.high, nbytes, name)

    def _release(self, region: Region) -> None:
        if region.offset == self.high:
            self.high += region.nbytes
        else:
            self.holes.append((region.offset, region.nbytes))

class GatedMLP(nn.Module):
    """Feed-forward layer whose intermediates live in the arena."""

    def __init__(self, dim: int, hidden: int, arena: Arena):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.arena = arena

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.arena.frame() as ws:  # clean: the result is computed into memory of its own before the frame ends
            rows = x.reshape(-1, x.shape[-1])
            a = ws.temp((rows.shape[0], self.up.out_features), x.dtype)
            b = ws.temp((rows.shape[0], self.up.out_features), x.dtype)
            torch.mm(rows, self.up.weight.t(), out=a)
            torch.mm(rows, self.gate.weight.t(), out=b)
            a.mul_(torch.nn.functional.silu(b))
            return self.down(a).view_as(x)

class Router(nn.Module):
    def __init__(self, dim: int, experts: nn.ModuleList, arena: Arena, top_k: int = 2):
        super().__init__()
        self.gate = nn.Linear(dim, len(experts), bias=False)
        self.experts = experts
        self.arena = arena
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = self.arena.push()  # leak: an empty batch returns before pop()
        scores = self.gate(x)
        if x.shape[0] == 0:
            return torch.zeros_like(x)
        weights, chosen = scores.softmax(-1).topk(self.top_k, dim=-1)
        acc = self.arena.temp(x.shape, x.dtype)
        acc.zero_()
        for e, expert in enumerate(self.experts):
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            acc.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        out = acc.clone()
        self.arena.pop(depth)
        return out

class MaskCache:
    """Attention masks by (rows, columns)."""

    def __init__(self, arena: Arena, limit: int = 16):
        self.arena = arena
        self.limit = limit
        self._masks: dict[tuple[int, int], Region] = {}

    def get(self, rows: int, cols: int) -> torch.Tensor:
        key = (rows, cols)
        region = self._masks.get(key)
        if region is None:
            if len(self._masks) >= self.limit:
                # oldest first
                self._masks.pop(next(iter(self._masks)))
            region = self.arena.region(f"mask{key}", rows * cols)  # leak: at the limit the oldest entry is dropped without release()
            mask = region.tensor(key, torch.bool)
            mask.copy_(torch.ones(key, device=mask.device).tril(cols - rows).bool())
            self._masks[key] = region
        return region.tensor(key, torch.bool)

    def clear(self) -> None:
        for region in self._masks.values():
            region.release()
        self._masks.clear()

class GraphRunner:
    """A captured graph needs its inputs at fixed addresses: two regions for each batch size."""

    def __init__(self, model, arena: Arena, dim: int):
        self.model = model
        self.arena = arena
        self.dim = dim
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Region, Region]] = {}

    def capture(self, batch: int) -> bool:
        if batch in self.graphs:
            return True
        nbytes = batch * self.dim * 4
        src = self.arena.region(f"in{batch}", nbytes)  # leak: WorkspaceFull of the second region is answered with False, the first stays taken
        try:
            dst = self.arena.region(f"out{batch}", nbytes)  # clean: the table owns both, evict() releases them
        except WorkspaceFull:
            log.info("no graph for batch %d", batch)
            return False
        graph = torch.cuda.CUDAGraph()
        x = src.tensor((batch, self.dim), torch.float32)
        y = dst.tensor((batch, self.dim), torch.float32)
        with torch.cuda.graph(graph):
            y.copy_(self.model(x))
        self.graphs[batch] = (graph, src, dst)
        return True

    def evict(self, batch: int) -> None:
        entry = self.graphs.pop(batch, None)
        if entry is None:
            return
        _, src, dst = entry
        src.release()
        dst.release()

def chunked_logits(arena: Arena, hidden: torch.Tensor, head: nn.Linear, chunk: int) -> typing.Iterator[torch.Tensor]:
    """Logits of a long sequence, a chunk at a time. The consumer must be done with one before it asks for the next."""
    for start in range(0, hidden.shape[0], chunk):
        depth = arena.push()  # clean: near miss, finally pops also when the consumer stops in the middle
        try:
            part = hidden[start:start + chunk]
            out = arena.temp((part.shape[0], head.out_features), hidden.dtype)
            torch.mm(part, head.weight.t(), out=out)
            yield out
        finally:
            arena.pop(depth)

def sample_with_retry(arena: Arena, logits: torch.Tensor, tries: int = 3) -> torch.Tensor:
    """Gumbel sampling in the arena; falls back to argmax."""
    for attempt in range(tries):
        depth = arena.push()  # leak: WorkspaceFull is caught outside and the mark stays
        try:
            noise = arena.temp(logits.shape, logits.dtype)
            noise.exponential_()
            picked = (logits.softmax(-1) / noise).argmax(-1)
            arena.pop(depth)
            return picked
        except WorkspaceFull:
            log.warning("try %d: no room for noise", attempt)
    return logits.argmax(-1)

def export_tables(arena: Arena, tables: dict[str, torch.Tensor]) -> dict[str, Region]:
    """Copy constant tables into regions, all or none."""
    done: dict[str, Region] = {}
    try:
        for name, table in tables.items():
            region = arena.region(name, table.numel() * table.element_size())  # clean: near miss, in the dict before anything fails, the handler releases them all
            done[name] = region
            region.tensor(table.shape, table.dtype).copy_(table)
    except WorkspaceFull:
        for region in done.values():
            region.release()
        raise
    return done

def measure(arena: Arena, model, shapes) -> dict:
    """Peak workspace by input shape."""
    peaks = {}
    scratch = arena.region("measure", 1 << 20)  # leak: a shape that is too large for the scratch raises ShapeMismatch, which ends the loop by return
    for shape in shapes:
        try:
            x = scratch.tensor(shape, torch.float32)
        except ShapeMismatch:
            return peaks
        arena.peak = arena.low
        with arena.frame():  # clean: with block
            model(x)
        peaks[tuple(shape)] = arena.peak
    scratch.release()
    return peaks
