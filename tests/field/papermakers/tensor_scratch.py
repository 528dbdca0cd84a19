"""Scratch tensors for attention kernels, cached by shape, and graph inputs."""
from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from typing import Any, Callable

import torch


class ScratchCache:
    def __init__(self, device: str = "cuda", limit_bytes: int = 1 << 30):
        self.device = device
        self.limit = limit_bytes
        self.live_bytes = 0
        self._by_key: dict[tuple, list[torch.Tensor]] = defaultdict(list)

    def rent(self, shape: tuple[int, ...], dtype=torch.bfloat16) -> torch.Tensor | None:
        key = (tuple(shape), dtype)
        if self._by_key[key]:
            return self._by_key[key].pop()  # clean: returned to the caller
        t = torch.empty(shape, dtype=dtype, device=self.device)
        if self.live_bytes + t.nbytes > self.limit:
            return None
        self.live_bytes += t.nbytes
        return t

    def unrent(self, t: torch.Tensor) -> None:
        self._by_key[(tuple(t.shape), t.dtype)].append(t)

    def rent_contiguous(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Cached tensor whose storage is aligned for TMA."""
        t = self.rent(shape)  # leak: a misaligned tensor is replaced by a second one and dropped
        if t is not None and t.data_ptr() % 128:
            t = self.rent((*shape[:-1], shape[-1] + 64))  # clean: the padded tensor is returned
        return t

    @contextlib.contextmanager
    def renting(self, *shapes: tuple[int, ...]):
        got: list[torch.Tensor] = []
        try:
            for shape in shapes:
                t = self.rent(shape)  # clean: near miss, collected in got, which finally empties
                if t is None:
                    raise MemoryError(shape)
                got.append(t)
            yield got
        finally:
            for t in got:
                self.unrent(t)


class Rented:
    """Context manager that optionally keeps its tensor for the next step."""

    def __init__(self, cache: ScratchCache, shape: tuple[int, ...], keep: bool = False):
        self.cache = cache
        self.shape = shape
        self.keep = keep
        self.t: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        if self.t is None:
            self.t = self.cache.rent(self.shape)  # clean: near miss, kept in self.t for reuse, drop() gives it back
        return self.t

    def __exit__(self, *exc) -> None:
        if not self.keep:
            self.drop()

    def drop(self) -> None:
        if self.t is not None:
            self.cache.unrent(self.t)
            self.t = None


class RentedQKV:
    def __init__(self, cache: ScratchCache, tokens: int, heads: int, dim: int):
        self.cache = cache
        self.shape = (tokens, heads, dim)
        self.parts: list[torch.Tensor] = []

    def __enter__(self):
        for _ in range(3):
            self.parts.append(self.cache.rent(self.shape))  # leak: __exit__ returns on an exception without giving the parts back
        return self.parts

    def __exit__(self, et, ev, tb):
        if et is not None:
            return isinstance(ev, torch.cuda.OutOfMemoryError)
        for t in self.parts:
            self.cache.unrent(t)
        self.parts.clear()
        return False


class ChunkedAttention:
    """Attention of one long sequence, computed in chunks of queries."""

    def __init__(self, cache: ScratchCache, heads: int, dim: int, chunk: int):
        self.cache = cache
        self.heads = heads
        self.dim = dim
        self.chunk = chunk
        self.acc: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def begin(self, tokens: int) -> bool:
        self.acc = self.cache.rent((tokens, self.heads, self.dim))  # clean: held in self.acc, end() gives it back
        if self.acc is None:
            return False
        self.lse = self.cache.rent((tokens, self.heads))  # clean: held in self.lse, the rollback only concerns acc
        if self.lse is None:
            self.cache.unrent(self.acc)
            self.acc = None
            return False
        return True

    def end(self) -> None:
        if self.acc is not None:
            self.cache.unrent(self.acc)
            self.acc = None
        if self.lse is not None:
            self.cache.unrent(self.lse)
            self.lse = None

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = self.cache.rent((q.shape[0], self.heads, k.shape[0]))  # clean: returned to the caller
        out.copy_(torch.einsum("qhd,khd->qhk", q, k))
        return out

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for i in range(0, q.shape[0], self.chunk):
            s = self._scores(q[i : i + self.chunk], k)  # clean: given back after the chunk
            p = s.softmax(-1)
            outs.append(torch.einsum("qhk,khd->qhd", p, v))
            self.cache.unrent(s)
        return torch.cat(outs)

    def entropy(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        p = self._scores(q, k).softmax(-1)  # leak: the pooled scores are read by softmax and dropped
        return -(p * p.clamp_min(1e-9).log()).sum(-1)

    def sink_mass(self, q: torch.Tensor, k: torch.Tensor, sinks: int) -> float:
        s = self._scores(q, k)  # leak: skipped when there are no sinks, the return comes first
        if sinks == 0:
            return 0.0
        mass = s.softmax(-1)[..., :sinks].sum(-1).mean().item()
        self.cache.unrent(s)
        return mass

    def running_max(self, q: torch.Tensor, chunks: list[torch.Tensor]) -> torch.Tensor | None:
        best: torch.Tensor | None = None
        for k in chunks:
            s = self._scores(q, k)  # leak: only the last scores are given back after the loop
            best = s.amax(-1) if best is None else torch.maximum(best, s.amax(-1))
        if best is not None:
            self.cache.unrent(s)
        return best


class GraphInputs:
    """Static input buffers per captured batch size."""

    def __init__(self, cache: ScratchCache, hidden: int):
        self.cache = cache
        self.hidden = hidden
        self.static: dict[int, torch.Tensor] = {}

    def buffer(self, bs: int) -> torch.Tensor:
        buf = self.static.get(bs)
        if buf is None:
            buf = self.static[bs] = self.cache.rent((bs, self.hidden))  # clean: near miss, owned by static, which reset empties
        return buf

    def reset(self) -> None:
        while self.static:
            _, t = self.static.popitem()  # clean: given back at once
            self.cache.unrent(t)


def with_scratch(shape: tuple[int, ...]):
    """Decorator: passes a rented tensor as keyword `scratch`."""

    def deco(fn: Callable[..., Any]):
        @functools.wraps(fn)
        def inner(cache: ScratchCache, *args, **kw):
            t = cache.rent(shape)  # clean: given back in finally
            try:
                return fn(cache, *args, scratch=t, **kw)
            finally:
                if t is not None:
                    cache.unrent(t)

        return inner

    return deco


@with_scratch((4096, 128))
def rope_inplace(cache: ScratchCache, x: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    half = cache.rent((x.shape[0], x.shape[1] // 2))  # leak: odd dimensions raise after it was rented
    if x.shape[1] % 2:
        raise ValueError("rotary dimension must be even")
    half.copy_(x[:, 1::2])
    x[:, 1::2] = x[:, ::2]
    x[:, ::2] = -half
    cache.unrent(half)
    return x
