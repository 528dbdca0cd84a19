"""Device workspace for split-KV flash decoding.

One flat uint8 buffer is carved into extents; kernels receive typed views over
the extent they were given.  Extents are coalesced when they come back.
"""
from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

ALIGN = 256


@dataclass(frozen=True)
class Extent:
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class WorkspaceArena:
    """First-fit allocator over one device buffer."""

    def __init__(self, capacity: int, device: str = "cuda") -> None:
        self._buf = torch.empty(capacity, dtype=torch.uint8, device=device)
        self._holes: list[Extent] = [Extent(0, capacity)]
        self._mutex = threading.Lock()
        self.live_bytes = 0

    def carve(self, nbytes: int) -> Optional[Extent]:
        need = -(-nbytes // ALIGN) * ALIGN
        with self._mutex:
            for i, hole in enumerate(self._holes):
                if hole.nbytes < need:
                    continue
                if hole.nbytes == need:
                    del self._holes[i]
                else:
                    self._holes[i] = Extent(hole.offset + need, hole.nbytes - need)
                self.live_bytes += need
                return Extent(hole.offset, need)
        return None

    def restore(self, ext: Extent) -> None:
        with self._mutex:
            self.live_bytes -= ext.nbytes
            self._holes.append(ext)
            self._holes.sort(key=lambda e: e.offset)
            merged: list[Extent] = []
            for hole in self._holes:
                if merged and merged[-1].end == hole.offset:
                    merged[-1] = Extent(merged[-1].offset, merged[-1].nbytes + hole.nbytes)
                else:
                    merged.append(hole)
            self._holes = merged

    def view(self, ext: Extent, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        raw = self._buf[ext.offset:ext.end].view(dtype)
        return raw[:count].view(*shape)


def _dense_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhd,bhsd->bhs", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), v)


def _carve_or_die(arena: WorkspaceArena, nbytes: int) -> Extent:
    ext = arena.carve(nbytes)  # clean: handed to the caller
    if ext is None:
        raise MemoryError(f"workspace exhausted: {nbytes} bytes, {arena.live_bytes} live")
    return ext


def split_decode(arena: WorkspaceArena, q, k, v, n_splits: int) -> torch.Tensor:
    b, h, d = q.shape
    part = arena.carve(b * h * n_splits * d * 4)  # leak: not restored when the lse carve fails
    if part is None:
        return _dense_decode(q, k, v)
    lse = arena.carve(b * h * n_splits * 4)  # clean: None-checked, restored before the return
    if lse is None:
        return _dense_decode(q, k, v)
    partial = arena.view(part, (n_splits, b, h, d), torch.float32)
    stats = arena.view(lse, (n_splits, b, h), torch.float32)
    for s, (ks, vs) in enumerate(zip(k.chunk(n_splits, dim=2), v.chunk(n_splits, dim=2))):
        scores = torch.einsum("bhd,bhsd->bhs", q, ks) * d ** -0.5
        stats[s] = scores.logsumexp(-1)
        partial[s] = torch.einsum("bhs,bhsd->bhd", scores.softmax(-1), vs)
    weights = (stats - stats.logsumexp(0)).exp()
    out = (partial * weights.unsqueeze(-1)).sum(0)
    arena.restore(lse)
    arena.restore(part)
    return out.to(q.dtype)


def prefill(arena: WorkspaceArena, q, k, v, *, return_lse: bool = False):
    b, h, s, d = q.shape
    acc = arena.carve(b * h * s * d * 4)  # clean: restored on all three ways out
    if acc is None:
        return _dense_decode(q, k, v), None
    lse = None
    if return_lse:
        lse = arena.carve(b * h * s * 4)  # clean: near miss, same flag guards carve and restore
        if lse is None:
            arena.restore(acc)
            return _dense_decode(q, k, v), None
    out32 = arena.view(acc, (b, h, s, d), torch.float32)
    scores = torch.matmul(q, k.transpose(-1, -2)) * d ** -0.5
    torch.matmul(scores.softmax(-1), v, out=out32)
    stats = None
    if return_lse:
        stats = arena.view(lse, (b, h, s), torch.float32).copy_(scores.logsumexp(-1)).clone()
        arena.restore(lse)
    out = out32.to(q.dtype)
    arena.restore(acc)
    return out, stats


def masked_scores(arena: WorkspaceArena, q, k, *, causal: bool, window: int = 0) -> torch.Tensor:
    s = q.shape[-2]
    bias_ext = None
    if causal or window > 0:
        bias_ext = _carve_or_die(arena, s * s * 4)  # leak: window without causal never restores it
        bias = arena.view(bias_ext, (s, s), torch.float32).zero_()
        if window > 0:
            bias.masked_fill_(torch.ones_like(bias).tril(-window).bool(), float("-inf"))
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias_ext is not None:
        scores = scores + arena.view(bias_ext, (s, s), torch.float32)
    if causal:
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        arena.restore(bias_ext)
    return scores


def tree_reduce(arena: WorkspaceArena, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pairwise sum through two ping-pong extents."""
    nbytes = parts[0].numel() * 4
    src = arena.carve(nbytes)  # clean: near miss, swapped with dst, both restored
    dst = arena.carve(nbytes)  # clean: near miss, swapped with src, both restored
    if src is None or dst is None:
        for ext in (src, dst):
            if ext is not None:
                arena.restore(ext)
        return torch.stack(list(parts)).sum(0)
    arena.view(src, parts[0].shape, torch.float32).copy_(parts[0])
    for p in parts[1:]:
        a = arena.view(src, p.shape, torch.float32)
        torch.add(a, p, out=arena.view(dst, p.shape, torch.float32))
        src, dst = dst, src
    total = arena.view(src, parts[0].shape, torch.float32).clone()
    arena.restore(src)
    arena.restore(dst)
    return total


class DecodePlan:
    """Keeps a workspace between steps and enlarges it with the batch."""

    def __init__(self, arena: WorkspaceArena, heads: int, head_dim: int) -> None:
        self._arena = arena
        self._row = heads * head_dim * 4
        self._tmp: Optional[Extent] = None

    def ensure(self, batch: int) -> bool:
        need = batch * self._row
        if self._tmp is not None and self._tmp.nbytes >= need:
            return True
        self._tmp = self._arena.carve(need)  # leak: a smaller extent held before is overwritten
        return self._tmp is not None

    def finish(self) -> None:
        if self._tmp is not None:
            self._arena.restore(self._tmp)
            self._tmp = None


class PrefillPlan(DecodePlan):
    def ensure(self, batch: int) -> bool:
        need = batch * self._row
        if self._tmp is not None:
            if self._tmp.nbytes >= need:
                return True
            self._arena.restore(self._tmp)
            self._tmp = None
        self._tmp = self._arena.carve(need)  # clean: near miss, the old one went back above, finish() ends it
        return self._tmp is not None
