"""Workspaces for fp8 matmuls: an arena, a cache above it and a tracing layer above that."""
from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Dict, List, Optional, Protocol, Tuple

import torch

log = logging.getLogger(__name__)

E4M3_MAX = 448.0


class Workspace:
    __slots__ = ("data", "nbytes", "tag")

    def __init__(self, data: torch.Tensor, nbytes: int) -> None:
        self.data = data
        self.nbytes = nbytes
        self.tag = ""


class Provider(Protocol):
    def obtain(self, nbytes: int) -> Optional[Workspace]: ...

    def relinquish(self, ws: Workspace) -> None: ...


class Arena:
    """The device's budget; every obtain() is a fresh allocation counted against it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.taken = 0

    def obtain(self, nbytes: int) -> Optional[Workspace]:
        if self.taken + nbytes > self.budget:
            return None
        self.taken += nbytes
        return Workspace(torch.empty(nbytes, dtype=torch.uint8, device="cuda"), nbytes)

    def relinquish(self, ws: Workspace) -> None:
        self.taken -= ws.nbytes
        ws.data = None


class CachedProvider:
    """Keeps relinquished workspaces, least recently used first, up to `keep`."""

    def __init__(self, below: Provider, keep: int) -> None:
        self.below = below
        self.keep = keep
        self._lru: "OrderedDict[int, List[Workspace]]" = OrderedDict()
        self._count = 0

    def obtain(self, nbytes: int) -> Optional[Workspace]:
        stack = self._lru.get(nbytes)
        if stack:
            self._count -= 1
            return stack.pop()
        ws = self.below.obtain(nbytes)  # clean: returned to the caller
        if ws is None and self._count:
            self.purge()
            ws = self.below.obtain(nbytes)  # clean: returned to the caller
        return ws

    def relinquish(self, ws: Workspace) -> None:
        if self._count >= self.keep:
            self.below.relinquish(ws)
            return
        self._lru.setdefault(ws.nbytes, []).append(ws)
        self._lru.move_to_end(ws.nbytes)
        self._count += 1

    def purge(self) -> None:
        for stack in self._lru.values():
            for ws in stack:
                self.below.relinquish(ws)
        self._lru.clear()
        self._count = 0

    def preload(self, sizes: List[int]) -> int:
        n = 0
        for nbytes in sizes:
            ws = self.below.obtain(nbytes)  # leak: one over the keep limit is neither cached nor relinquished
            if ws is None:
                break
            if self._count < self.keep:
                self._lru.setdefault(nbytes, []).append(ws)
                self._count += 1
                n += 1
        return n


class TracedProvider:
    def __init__(self, below: Provider, limit: int) -> None:
        self.below = below
        self.limit = limit
        self.open: Dict[int, Workspace] = {}

    def obtain(self, nbytes: int, tag: str = "") -> Optional[Workspace]:
        ws = self.below.obtain(nbytes)  # leak: not relinquished when too many are open and None is returned
        if ws is None:
            return None
        if len(self.open) >= self.limit:
            log.error("%d workspaces open, refusing %s", len(self.open), tag)
            return None
        ws.tag = tag
        self.open[id(ws)] = ws
        return ws

    def relinquish(self, ws: Workspace) -> None:
        del self.open[id(ws)]
        self.below.relinquish(ws)

    def obtain_exact(self, nbytes: int) -> Workspace:
        ws = self.obtain(nbytes, "exact")  # clean: returned, only None leads to the error
        if ws is None:
            raise torch.cuda.OutOfMemoryError(f"{nbytes} bytes of workspace")
        return ws


class Fp8Linear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor, ws: TracedProvider, cache_weight: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.ws = ws
        self.cache_weight = cache_weight
        self._w8: Optional[Workspace] = None
        self._wt8: Optional[Workspace] = None
        self._scale = self._wt_scale = 1.0

    def _quant(self, x: torch.Tensor, tag: str) -> Tuple[Optional[Workspace], float]:
        amax = float(x.abs().amax())
        ws = self.ws.obtain(x.numel(), tag)  # leak: not relinquished when amax is zero
        if ws is None:
            return None, 1.0
        if amax == 0.0:
            return None, 1.0
        scale = E4M3_MAX / amax
        ws.data.view(torch.float8_e4m3fn).copy_((x * scale).view(-1))
        return ws, scale

    def _weight8(self) -> Tuple[Optional[Workspace], float]:
        if self.cache_weight and self._w8 is not None:
            return self._w8, self._scale
        ws, scale = self._quant(self.weight, "weight")  # clean: returned, and held in _w8 if weights are cached
        if self.cache_weight:
            self._w8, self._scale = ws, scale
        return ws, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w8, sw = self._weight8()  # clean: near miss, relinquished unless weights are cached, then free_weight() does it
        x8, sx = self._quant(x, "input")  # clean: relinquished when there is one
        if w8 is None or x8 is None:
            out = torch.nn.functional.linear(x, self.weight)
        else:
            a = x8.data.view(torch.float8_e4m3fn).view(x.shape)
            b = w8.data.view(torch.float8_e4m3fn).view(self.weight.shape)
            out = torch._scaled_mm(a, b.t(), out_dtype=torch.bfloat16) / (sw * sx)
        if x8 is not None:
            self.ws.relinquish(x8)
        if w8 is not None and not self.cache_weight:
            self.ws.relinquish(w8)
        return out

    def free_weight(self) -> None:
        if self._w8 is not None:
            self.ws.relinquish(self._w8)
            self._w8 = None

        if self._wt8 is not None:
            self.ws.relinquish(self._wt8)
            self._wt8 = None

    def refresh_transposed(self) -> None:
        if not self.cache_weight:
            return
        self._wt8, self._wt_scale = self._quant(self.weight.t().contiguous(), "weight.t")  # leak: the next refresh overwrites the workspace

    def error_of(self, x: torch.Tensor) -> float:
        x8, s = self._quant(x, "error")  # leak: not relinquished when weights are cached
        if x8 is None:
            return 0.0
        back = x8.data.view(torch.float8_e4m3fn).float().view(x.shape) / s
        err = float((back - x).norm() / x.norm())
        if not self.cache_weight:
            self.ws.relinquish(x8)
        return err


def split_k(ws: TracedProvider, a: torch.Tensor, b: torch.Tensor, parts: int) -> torch.Tensor:
    nbytes = a.shape[0] * b.shape[1] * 4
    partial: List[Workspace] = []
    for _ in range(parts):
        p = ws.obtain(nbytes, "split_k")  # clean: all in partial are relinquished on both ways out
        if p is None:
            for q in partial:
                ws.relinquish(q)
            return torch.mm(a.float(), b.float())
        partial.append(p)
    step = a.shape[1] // parts
    for i, p in enumerate(partial):
        out = p.data.view(torch.float32).view(a.shape[0], b.shape[1])
        torch.mm(a[:, i * step:(i + 1) * step].float(), b[i * step:(i + 1) * step].float(), out=out)
    total = sum(p.data.view(torch.float32) for p in partial).view(a.shape[0], b.shape[1])
    for p in partial:
        ws.relinquish(p)
    return total


def autotune(ws: TracedProvider, run, sizes: List[int]) -> int:
    best, best_ms = 0, float("inf")
    for nbytes in sizes:
        w = ws.obtain(nbytes, "autotune")  # clean: relinquished before the result is compared
        if w is None:
            continue
        ms = run(w.data)
        ws.relinquish(w)
        if ms < best_ms:
            best, best_ms = nbytes, ms
    return best
