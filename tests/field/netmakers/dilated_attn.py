"""Dilated (LongNet-style) attention. Gathered segments are kept in tensors cached by shape."""
from __future__ import annotations

import math
from typing import Sequence

import torch

_Key = tuple[tuple[int, ...], torch.dtype, str]


class ShapeCache:
    """Tensors cached by (shape, dtype, device); at most `cap` idle ones a key."""

    def __init__(self, cap: int = 4) -> None:
        self.cap = cap
        self._idle: dict[_Key, list[torch.Tensor]] = {}
        self.hits = self.misses = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device) -> torch.Tensor:
        key = (tuple(shape), dtype, str(device))
        stack = self._idle.get(key)
        if stack:
            self.hits += 1
            return stack.pop()  # clean: handed to the caller
        self.misses += 1
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def give(self, *tensors: torch.Tensor | None) -> None:
        for t in tensors:
            if t is None:
                continue
            stack = self._idle.setdefault((tuple(t.shape), t.dtype, str(t.device)), [])
            if len(stack) < self.cap:
                stack.append(t)


_cache = ShapeCache()


def gather_dilated(x: torch.Tensor, segment: int, rate: int, offset: int = 0) -> torch.Tensor:
    """(b, n, h, d) -> (b, n/segment, segment/rate, h, d), in a cached tensor owned by the caller."""
    b, n, h, d = x.shape
    out = _cache.empty((b, n // segment, segment // rate, h, d), x.dtype, x.device)  # clean: returned to the caller
    out.copy_(x.view(b, n // segment, segment, h, d)[:, :, offset::rate][:, :, : segment // rate])
    return out


def pad_to(x: torch.Tensor, multiple: int) -> tuple[torch.Tensor, bool]:
    """Padded tensor and whether it is a cached one that the caller has to give back."""
    n = x.shape[1]
    short = -n % multiple
    if short == 0:
        return x, False
    out = _cache.empty((x.shape[0], n + short, *x.shape[2:]), x.dtype, x.device)  # clean: near miss, returned with the flag that says it is owned
    out[:, :n].copy_(x)
    out[:, n:].zero_()
    return out, True


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.einsum("bgqhd,bgkhd->bghqk", q, k) / math.sqrt(q.shape[-1])
    lse = torch.logsumexp(s, -1)
    return torch.einsum("bghqk,bgkhd->bgqhd", torch.softmax(s, -1), v), lse


def dilated_branch(q, k, v, segment: int, rate: int):
    qs = gather_dilated(q, segment, rate)  # clean: given back after _attend
    ks = gather_dilated(k, segment, rate)  # clean: given back after _attend
    vs = gather_dilated(v, segment, rate)  # clean: given back after _attend
    o, lse = _attend(qs, ks, vs)
    _cache.give(qs, ks, vs)
    return o, lse


def dilated_branch_shared_kv(q, kv, segment: int, rate: int):
    """Multi-query variant in which K and V are the same projection."""
    qs = gather_dilated(q, segment, rate)  # clean: given back
    o, lse = _attend(qs, *[gather_dilated(kv, segment, rate)] * 2)  # leak: the gathered K/V is an argument only and never given back
    _cache.give(qs)
    return o, lse


def dilated_branch_padded(q, k, v, segment: int, rate: int):
    q, own_q = pad_to(q, segment)  # clean: near miss, given back under the flag
    k, own_k = pad_to(k, segment)  # clean: near miss, given back under the flag
    v, own_v = pad_to(v, segment)  # leak: own_v is not looked at, only q and k are given back
    o, lse = dilated_branch(q, k, v, segment, rate)
    if own_q:
        _cache.give(q)
    if own_k:
        _cache.give(k)
    return o, lse


def branch_norm(x: torch.Tensor, segment: int, rate: int) -> torch.Tensor:
    return gather_dilated(x, segment, rate).norm(dim=-1)  # leak: reduced to a new tensor, the gathered one is dropped


def gather_contiguous(x: torch.Tensor, segment: int, rate: int) -> torch.Tensor:
    g = gather_dilated(x, segment, rate)  # leak: the clone is returned and the cached tensor is dropped
    return g.flatten(1, 2).clone()


class BranchMixer:
    """Weighs the outputs of several (segment, rate) branches by their log-sum-exp."""

    def __init__(self, branches: Sequence[tuple[int, int]], cache: ShapeCache = _cache) -> None:
        self.branches = list(branches)
        self.cache = cache
        self._mask: torch.Tensor | None = None

    def _scatter(self, o: torch.Tensor, n: int, rate: int) -> torch.Tensor:
        b, g, s, h, d = o.shape
        full = self.cache.empty((b, n, h, d), o.dtype, o.device)  # clean: returned to the caller
        full.zero_()
        full.view(b, g, s * rate, h, d)[:, :, ::rate].copy_(o)
        return full

    def mix_until(self, q, k, v, tol: float) -> torch.Tensor:
        prev = None
        for segment, rate in self.branches:
            o, _ = dilated_branch(q, k, v, segment, rate)
            full = self._scatter(o, q.shape[1], rate)  # leak: on convergence the loop breaks without giving back the newest one
            if prev is not None:
                if (full - prev).abs().max() < tol:
                    break
                self.cache.give(prev)
            prev = full
        out = prev.clone()
        self.cache.give(prev)
        return out

    def mask(self, t: torch.Tensor) -> torch.Tensor:
        if self._mask is None or self._mask.shape != t.shape:
            self.cache.give(self._mask)
            self._mask = self.cache.empty(t.shape, t.dtype, t.device)  # clean: near miss, the mask of another shape was given back on the line before
            self._mask.fill_(1)
        return self._mask

    def masked_sum(self, t: torch.Tensor) -> torch.Tensor:
        return (t * self.mask(t)).sum()  # clean: near miss, the mask stays owned by self and reset() gives it back

    def reset(self) -> None:
        self.cache.give(self._mask)
        self._mask = None
