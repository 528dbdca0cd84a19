"""Scratch tensors cached by shape and dtype, shared by the services of one host process."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict

import torch


class ShapeCache:
    def __init__(self, device: str = "cpu", keep: int = 8) -> None:
        self.device = device
        self.keep = keep
        self._shelf: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        self._mutex = threading.Lock()
        self.lent = 0

    def rent(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        key = (tuple(shape), dtype)
        with self._mutex:
            self.lent += 1
            shelf = self._shelf[key]
            if shelf:
                return shelf.pop()  # clean: returned to the caller
        return torch.empty(shape, dtype=dtype, device=self.device)

    def shelve(self, t: torch.Tensor) -> None:
        key = (tuple(t.shape), t.dtype)
        with self._mutex:
            self.lent -= 1
            if len(self._shelf[key]) < self.keep:
                self._shelf[key].append(t)

    def rent_zero(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.rent(shape, dtype).zero_()  # clean: zero_ returns the same tensor to the caller

    def rent_like(self, t: torch.Tensor) -> torch.Tensor:
        out = self.rent(tuple(t.shape), t.dtype)  # clean: filled and returned
        out.copy_(t)
        return out

    @contextlib.contextmanager
    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32):
        t = self.rent(shape, dtype)  # clean: shelved in finally
        try:
            yield t
        finally:
            self.shelve(t)


BUS = ShapeCache()


class Normalizer:
    """Feature normaliser of the embedding service."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, cache: ShapeCache = BUS) -> None:
        self.mean = mean
        self.std = std
        self.cache = cache

    def _whiten(self, x: torch.Tensor) -> torch.Tensor:
        out = self.cache.rent_like(x)  # clean: returned to the caller, who shelves it
        out.sub_(self.mean).div_(self.std)
        return out

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._whiten(x).clone()  # leak: the rented result is copied and dropped

    def apply_into(self, x: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        white = self._whiten(x)  # clean: shelved once copied
        dst.copy_(white)
        self.cache.shelve(white)
        return dst

    def score(self, x: torch.Tensor, probe: torch.Tensor) -> float:
        white = self._whiten(x)  # leak: shelved on neither way out
        if white.shape[-1] != probe.shape[-1]:
            return 0.0
        return float((white @ probe).mean())


class Pooler:
    """Mean pooling over ragged batches."""

    def __init__(self, cache: ShapeCache) -> None:
        self.cache = cache
        self._acc: torch.Tensor | None = None

    def begin(self, width: int) -> None:
        if self._acc is not None:
            self.cache.shelve(self._acc)
        self._acc = self.cache.rent_zero((width,))  # clean: near miss, the one before is shelved first

    def add(self, row: torch.Tensor) -> None:
        assert self._acc is not None
        wide = self.cache.rent((row.shape[0],))  # clean: shelved after the sum
        wide.copy_(row)
        self._acc.add_(wide)
        self.cache.shelve(wide)

    def finish(self, n: int) -> torch.Tensor:
        assert self._acc is not None
        out = self._acc.div(max(n, 1))
        self.cache.shelve(self._acc)
        self._acc = None
        return out


class EpochCounts:
    def __init__(self, cache: ShapeCache) -> None:
        self.cache = cache
        self._counts: torch.Tensor | None = None

    def roll(self, classes: int) -> None:
        self._counts = self.cache.rent_zero((classes,), torch.int64)  # leak: the next roll rebinds it unshelved

    def bump(self, labels: torch.Tensor) -> None:
        if self._counts is not None:
            self._counts.add_(torch.bincount(labels, minlength=self._counts.shape[0]))

    def stop(self) -> None:
        if self._counts is not None:
            self.cache.shelve(self._counts)
            self._counts = None


def pairwise(a: torch.Tensor, b: torch.Tensor, cache: ShapeCache = BUS) -> torch.Tensor:
    with cache.scratch((a.shape[0], b.shape[0])) as d:  # clean: context manager
        torch.mm(a, b.t(), out=d)
        return d.clone()


def accumulate(parts: list[torch.Tensor], cache: ShapeCache = BUS) -> torch.Tensor:
    """Tree sum; the caller shelves the result."""
    total = cache.rent_like(parts[0])  # clean: near miss, swapped with spare, and the one not returned is shelved
    spare = cache.rent_like(parts[0])  # clean: near miss, one of the two is shelved and the other returned
    for p in parts[1:]:
        torch.add(total, p, out=spare)
        total, spare = spare, total
    cache.shelve(spare)
    return total


def running_max(parts: list[torch.Tensor], cache: ShapeCache = BUS) -> torch.Tensor:
    """The caller shelves the result."""
    top = cache.rent_like(parts[0])  # leak: rebound at the first turn
    for p in parts[1:]:
        nxt = cache.rent_like(p)  # leak: every turn but the last loses the tensor of the turn before
        torch.maximum(top, p, out=nxt)
        top = nxt
    return top


def publish_mean(parts: list[torch.Tensor], send, cache: ShapeCache = BUS) -> None:
    send(accumulate(parts, cache).div(len(parts)))  # leak: div makes a new tensor and nobody shelves the sum
