"""Attention modules that share scratch space through a workspace manager.

Softmax statistics, split-K partials and rotary tables are written to scratch regions cut from one big tensor.
Regions are named by a (start, length) extent and have to be surrendered in any order.
"""
from __future__ import annotations

import math
from bisect import insort
from typing import Dict, List, NamedTuple, Optional, Protocol, Tuple

import torch
from torch import nn


class Extent(NamedTuple):
    start: int
    length: int


class ScratchSource(Protocol):
    def obtain(self, numel: int) -> Extent: ...

    def surrender(self, ext: Extent) -> None: ...

    def tensor(self, ext: Extent) -> torch.Tensor: ...


class Workspace:
    """First fit with coalescing."""

    def __init__(self, numel: int, device="cuda"):
        self._data = torch.empty(numel, device=device)
        self._holes: List[Extent] = [Extent(0, numel)]

    def _cut(self, numel: int) -> Optional[Extent]:
        for i, hole in enumerate(self._holes):
            if hole.length >= numel:
                if hole.length == numel:
                    del self._holes[i]
                else:
                    self._holes[i] = Extent(hole.start + numel, hole.length - numel)
                return Extent(hole.start, numel)
        return None

    def obtain(self, numel: int) -> Extent:
        ext = self._cut(numel)  # clean: returned to the caller, or None
        if ext is None:
            raise MemoryError(f"workspace cannot serve {numel} elements")
        return ext

    def obtain_aligned(self, numel: int, align: int) -> Optional[Extent]:
        """Region whose start is a multiple of align."""
        ext = self._cut(numel + align)  # leak: the head and tail that are trimmed off go nowhere
        if ext is None:
            return None
        start = -(-ext.start // align) * align
        return Extent(start, numel)

    def surrender(self, ext: Extent) -> None:
        insort(self._holes, ext)
        merged: List[Extent] = []
        for hole in self._holes:
            if merged and merged[-1].start + merged[-1].length == hole.start:
                merged[-1] = Extent(merged[-1].start, merged[-1].length + hole.length)
            else:
                merged.append(hole)
        self._holes = merged

    def tensor(self, ext: Extent) -> torch.Tensor:
        return self._data[ext.start:ext.start + ext.length]


class Scoped:
    """`with Scoped(ws, n) as t:` gives a tensor over a region for the length of the block."""

    def __init__(self, ws: ScratchSource, numel: int):
        self.ws = ws
        self.numel = numel
        self.ext: Optional[Extent] = None

    def __enter__(self) -> torch.Tensor:
        self.ext = self.ws.obtain(self.numel)  # clean: __exit__ surrenders it
        return self.ws.tensor(self.ext)

    def __exit__(self, *exc) -> None:
        self.ws.surrender(self.ext)
        self.ext = None


class ZeroedScope:
    """As Scoped; the region is zeroed on entry, and wiped on exit when it held secrets (DP noise)."""

    def __init__(self, ws: ScratchSource, numel: int, wipe: bool = False):
        self.ws = ws
        self.numel = numel
        self.wipe = wipe
        self.ext: Optional[Extent] = None

    def __enter__(self) -> torch.Tensor:
        self.ext = self.ws.obtain(self.numel)  # leak: without wipe, __exit__ returns before the surrender
        return self.ws.tensor(self.ext).zero_()

    def __exit__(self, *exc) -> None:
        if not self.wipe:
            return
        self.ws.tensor(self.ext).zero_()
        self.ws.surrender(self.ext)


class SplitKAttention(nn.Module):
    def __init__(self, ws: Workspace, heads: int, dim: int, splits: int = 4):
        super().__init__()
        self.ws = ws
        self.heads = heads
        self.dim = dim
        self.splits = splits
        self.proj = nn.Linear(dim, dim)
        self._lse: Optional[Extent] = None

    def _partials(self, rows: int) -> Tuple[Extent, Extent]:
        acc = self.ws.obtain(self.splits * rows * self.dim)  # clean: returned to the caller in the pair
        lse = self.ws.obtain(self.splits * rows)  # clean: returned to the caller in the pair
        return acc, lse

    def forward(self, q, k, v):
        rows = q.shape[0] * q.shape[1]
        acc, lse = self._partials(rows)  # clean: near miss, acc is surrendered here, lse by release_lse
        out = self.ws.tensor(acc).view(self.splits, rows, self.dim)
        stat = self.ws.tensor(lse).view(self.splits, rows)
        step = k.shape[1] // self.splits
        for i in range(self.splits):
            s = q @ k[:, i * step:(i + 1) * step].transpose(-1, -2) / math.sqrt(self.dim)
            stat[i].copy_(torch.logsumexp(s, -1).flatten())
            out[i].copy_((s.softmax(-1) @ v[:, i * step:(i + 1) * step]).view(rows, self.dim))
        weights = stat.softmax(0).unsqueeze(-1)
        y = (weights * out).sum(0).view_as(q)
        self.ws.surrender(acc)
        self.release_lse()
        self._lse = lse
        return self.proj(y)

    def release_lse(self) -> None:
        if self._lse is not None:
            self.ws.surrender(self._lse)
            self._lse = None

    def entropy(self, q, k) -> torch.Tensor:
        """Per-split entropy for the attention-collapse monitor."""
        rows = q.shape[0] * q.shape[1]
        acc, lse = self._partials(rows)  # leak: only lse is surrendered
        stat = self.ws.tensor(lse).view(self.splits, rows)
        step = k.shape[1] // self.splits
        for i in range(self.splits):
            s = (q @ k[:, i * step:(i + 1) * step].transpose(-1, -2)).softmax(-1)
            stat[i].copy_(-(s * s.clamp_min(1e-9).log()).sum(-1).flatten())
        result = stat.mean(1)
        self.ws.surrender(lse)
        return result


class RotaryTable:
    """cos/sin tables in the workspace, grown on demand."""

    def __init__(self, ws: Workspace, dim: int):
        self.ws = ws
        self.dim = dim
        self.length = 0
        self.ext: Optional[Extent] = None
        self._ntk: Dict[float, Extent] = {}

    def ensure(self, length: int) -> torch.Tensor:
        if length > self.length:
            if self.ext is not None:
                self.ws.surrender(self.ext)
            self.ext = self.ws.obtain(length * self.dim)  # clean: the next growth or close surrenders it
            self.length = length
            inv = 10000 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
            self.ws.tensor(self.ext).view(length, -1)[:, ::2] = torch.outer(torch.arange(length), inv).cos()
        return self.ws.tensor(self.ext)

    def ntk(self, scale: float) -> torch.Tensor:
        if scale not in self._ntk:
            self._ntk[scale] = self.ws.obtain(self.length * self.dim)  # clean: near miss, close frees all
        return self.ws.tensor(self._ntk[scale])

    def close(self) -> None:
        if self.ext is not None:
            self.ws.surrender(self.ext)
            self.ext = None
        for ext in self._ntk.values():
            self.ws.surrender(ext)
        self._ntk.clear()


class SlidingTable(RotaryTable):
    """Keeps the table of the previous window as well, for the blend at a window's edge."""

    def __init__(self, ws: Workspace, dim: int):
        super().__init__(ws, dim)
        self.previous: Optional[Extent] = None

    def advance(self) -> None:
        self.previous = self.ws.obtain(self.length * self.dim)  # leak: the next advance overwrites it
        self.ws.tensor(self.previous).copy_(self.ws.tensor(self.ext))
        self.ws.tensor(self.ext).roll(-self.dim)

    def close(self) -> None:
        if self.previous is not None:
            self.ws.surrender(self.previous)
            self.previous = None
        super().close()


def chunked_softmax(ws: Workspace, x: torch.Tensor, chunk: int) -> torch.Tensor:
    out = torch.empty_like(x)
    for lo in range(0, x.shape[0], chunk):
        part = x[lo:lo + chunk]
        with Scoped(ws, part.numel()) as t:  # clean: surrendered on leaving the block
            t.copy_(part.flatten())
            out[lo:lo + chunk] = t.view_as(part).softmax(-1)
    return out


def row_max(ws: Workspace, x: torch.Tensor) -> Optional[torch.Tensor]:
    scope = Scoped(ws, x.shape[0])
    t = scope.__enter__()  # leak: the return for an empty tensor does not go through __exit__
    if x.shape[1] == 0:
        return None
    torch.amax(x, 1, out=t)
    result = t.clone()
    scope.__exit__(None, None, None)
    return result


def masked_rows(ws: Workspace, x: torch.Tensor, mask: torch.Tensor, fill: float) -> torch.Tensor:
    ext = None
    if mask.any():
        ext = ws.obtain(x.numel())  # clean: near miss, surrendered under the same condition
        ws.tensor(ext).copy_(x.masked_fill(mask, fill).flatten())
        y = ws.tensor(ext).view_as(x).softmax(-1)
    else:
        y = x.softmax(-1)
    if ext is not None:
        ws.surrender(ext)
    return y


def pad_to_tile(ws: Workspace, x: torch.Tensor, tile: int) -> torch.Tensor:
    pad = -x.shape[-1] % tile
    ext = ws.obtain(x.numel() + pad * x.shape[0])  # leak: surrendered only when there was something to pad
    t = ws.tensor(ext).view(x.shape[0], -1)
    t[:, : x.shape[-1]] = x
    y = t.clone()
    if pad:
        ws.surrender(ext)
    return y
