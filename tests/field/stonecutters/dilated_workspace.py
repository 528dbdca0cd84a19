"""Workspaces for segment-dilated attention.

Every (segment, dilation) branch gathers a strided slice of q/k/v into a dense
scratch tensor, runs attention on it and scatters the result.  Scratch tensors are
cached by shape at module level because the layers are rebuilt on every resize.
"""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)

Shape = Tuple[int, ...]

_lock = threading.RLock()
_cache: Dict[Tuple[Shape, torch.dtype], List[torch.Tensor]] = {}
_outstanding = 0
_ceiling = 256


def checkout_ws(shape: Shape, dtype=torch.float16, device="cuda") -> Optional[torch.Tensor]:
    global _outstanding
    with _lock:
        if _outstanding >= _ceiling:
            return None
        _outstanding += 1
        spare = _cache.get((tuple(shape), dtype))
        if spare:
            return spare.pop()
    return torch.empty(shape, dtype=dtype, device=device)


def checkin_ws(ws: torch.Tensor) -> None:
    global _outstanding
    with _lock:
        _outstanding -= 1
        _cache.setdefault((tuple(ws.shape), ws.dtype), []).append(ws)


def checkin_all(items: Sequence[Optional[torch.Tensor]]) -> None:
    for ws in items:
        if ws is not None:
            checkin_ws(ws)


def gather_branch(x: torch.Tensor, segment: int, dilation: int, offset: int = 0) -> Optional[torch.Tensor]:
    """Dense copy of one dilated branch, in a workspace the caller checks in."""
    b, n, h, d = x.shape
    n_seg = n // segment
    kept = (segment - offset + dilation - 1) // dilation
    ws = checkout_ws((b * n_seg, kept, h, d), x.dtype)  # clean: handed to the caller
    if ws is None:
        return None
    view = x[:, : n_seg * segment].reshape(b * n_seg, segment, h, d)
    ws.copy_(view[:, offset::dilation])
    return ws


def branch_attention(q, k, v, segment: int, dilation: int) -> Optional[torch.Tensor]:
    qs = gather_branch(q, segment, dilation)  # clean: near miss, checkin_all takes the three in every case
    ks = gather_branch(k, segment, dilation)  # clean: checkin_all
    vs = gather_branch(v, segment, dilation)  # clean: checkin_all
    out = None
    if qs is not None and ks is not None and vs is not None:
        out = F.scaled_dot_product_attention(qs.transpose(1, 2), ks.transpose(1, 2), vs.transpose(1, 2))
    checkin_all((qs, ks, vs))
    return out


def branch_norms(k, segments: Sequence[int], dilation: int) -> List[float]:
    norms = []
    for segment in segments:
        ks = gather_branch(k, segment, dilation)  # leak: continue on an odd branch skips the checkin
        if ks is None:
            break
        if ks.shape[1] % 2:
            log.debug("branch of segment %d has odd length", segment)
            continue
        norms.append(float(ks.float().norm()))
        checkin_ws(ks)
    return norms


def branch_mean(k, segment: int, dilation: int) -> torch.Tensor:
    return gather_branch(k, segment, dilation).mean(dim=1)  # leak: the workspace is reduced and dropped


def pooled_softmax(scores: torch.Tensor, keep: bool) -> torch.Tensor:
    ws = checkout_ws(scores.shape, scores.dtype)  # leak: with keep the result is a clone and the workspace is forgotten
    if ws is None:
        return torch.softmax(scores, dim=-1)
    torch.softmax(scores, dim=-1, out=ws)
    result = ws.clone()
    if not keep:
        checkin_ws(ws)
    return result


@contextlib.contextmanager
def scratch(shape: Shape, dtype=torch.float16):
    ws = checkout_ws(shape, dtype)  # clean: checked in in finally
    try:
        yield ws
    finally:
        if ws is not None:
            checkin_ws(ws)


@contextlib.contextmanager
def scratch_pair(shape: Shape, dtype=torch.float16):
    a = checkout_ws(shape, dtype)  # leak: when the second is refused the generator yields None and never checks it in
    b = checkout_ws(shape, dtype)  # clean: checked in in finally
    if a is None or b is None:
        if b is not None:
            checkin_ws(b)
        yield None
        return
    try:
        yield a, b
    finally:
        checkin_ws(a)
        checkin_ws(b)


class ScratchArena:
    """Bump allocation out of one workspace; marks unwind in order."""

    def __init__(self, elems: int, dtype=torch.float16):
        self.base = checkout_ws((elems,), dtype)  # clean: near miss, close() checks it in under the same None test
        self.top = 0
        self._marks: List[int] = []

    def close(self) -> None:
        if self.base is not None:
            checkin_ws(self.base)
            self.base = None

    def push_mark(self) -> int:
        self._marks.append(self.top)
        return len(self._marks)

    def pop_mark(self) -> None:
        self.top = self._marks.pop()

    def bump(self, shape: Shape) -> Optional[torch.Tensor]:
        n = 1
        for s in shape:
            n *= s
        if self.base is None or self.top + n > self.base.numel():
            return None
        view = self.base[self.top : self.top + n].view(shape)
        self.top += n
        return view

    def framed_sum(self, parts: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        self.push_mark()  # leak: the mark stays on the stack when bump() has no room
        acc = self.bump(tuple(parts[0].shape))
        if acc is None:
            return None
        acc.zero_()
        for p in parts:
            acc.add_(p)
        out = acc.clone()
        self.pop_mark()
        return out

    def framed_max(self, parts: Sequence[torch.Tensor]) -> Optional[torch.Tensor]:
        self.push_mark()  # clean: pop_mark in finally
        try:
            acc = self.bump(tuple(parts[0].shape))
            if acc is None:
                return None
            acc.copy_(parts[0])
            for p in parts[1:]:
                torch.maximum(acc, p, out=acc)
            return acc.clone()
        finally:
            self.pop_mark()


class DilatedLayer:
    def __init__(self, branches: Sequence[Tuple[int, int]], on_branch: Optional[Callable] = None):
        self.branches = list(branches)
        self.on_branch = on_branch
        self._held: Dict[int, torch.Tensor] = {}

    def forward(self, q, k, v) -> torch.Tensor:
        total = torch.zeros_like(q)
        for segment, dilation in self.branches:
            out = branch_attention(q, k, v, segment, dilation)
            if out is None:
                continue
            self._scatter(total, out, segment, dilation)
        return total

    def _scatter(self, total, out, segment: int, dilation: int) -> None:
        b, n, h, d = total.shape
        n_seg = n // segment
        with scratch((b * n_seg, segment, h, d), total.dtype) as dense:  # clean: the with block checks it in
            if dense is None:
                return
            dense.zero_()
            dense[:, ::dilation].copy_(out.transpose(1, 2))
            total[:, : n_seg * segment].add_(dense.view(b, n_seg * segment, h, d))

    def hold_keys(self, k) -> int:
        """Keeps the gathered keys for the backward pass."""
        for index, (segment, dilation) in enumerate(self.branches):
            if index in self._held:
                continue
            ks = gather_branch(k, segment, dilation)  # clean: near miss, moved into _held, emptied by drop_keys()
            if ks is None:
                break
            self._held[index] = ks
        return len(self._held)

    def drop_keys(self) -> None:
        while self._held:
            _, ks = self._held.popitem()
            checkin_ws(ks)
