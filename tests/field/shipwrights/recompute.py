"""Activation checkpointing with reusable RNG slots and stash tensors.

A checkpointed region remembers the RNG state of its forward in a slot of
RngBank and, optionally, its inputs in tensors of StashCache.
"""
from __future__ import annotations

import contextvars
from typing import Any, Callable

import torch
from torch import nn

_current: contextvars.ContextVar["RegionScope | None"] = contextvars.ContextVar("region", default=None)


class RngBank:
    """Rows of saved RNG states; a set of free row numbers."""

    def __init__(self, rows: int):
        width = torch.get_rng_state().numel()
        self.states = torch.empty(rows, width, dtype=torch.uint8)
        self.open_rows = set(range(rows))

    def snap(self) -> int:
        row = self.open_rows.pop()  # clean: returned to the caller
        self.states[row].copy_(torch.get_rng_state())
        return row

    def forget(self, row: int) -> None:
        self.open_rows.add(row)

    def play(self, row: int) -> None:
        torch.set_rng_state(self.states[row])

    def snap_if_room(self, floor: int) -> int | None:
        """Leaves at least ``floor`` rows to others."""
        row = self.open_rows.pop() if self.open_rows else None  # leak: the popped row is not added again below the floor
        if row is None or len(self.open_rows) < floor:
            return None
        self.states[row].copy_(torch.get_rng_state())
        return row


class StashCache:
    def __init__(self) -> None:
        self.shelf: dict[tuple, list[torch.Tensor]] = {}

    def lay(self, like: torch.Tensor) -> torch.Tensor:
        shelf = self.shelf.setdefault((like.shape, like.dtype, like.device), [])
        t = shelf.pop() if shelf else torch.empty_like(like)  # clean: returned to the caller
        return t.copy_(like)

    def clear_away(self, t: torch.Tensor) -> None:
        self.shelf.setdefault((t.shape, t.dtype, t.device), []).append(t)


class StashGroup:
    """A wrapper that clears away all that was laid through it."""

    def __init__(self, cache: StashCache):
        self.cache = cache
        self.laid: list[torch.Tensor] = []

    def lay(self, like: torch.Tensor) -> torch.Tensor:
        t = self.cache.lay(like)  # clean: in laid until close()
        self.laid.append(t)
        return t

    def lay_large(self, like: torch.Tensor, min_numel: int) -> torch.Tensor:
        t = self.cache.lay(like)  # leak: a small one is neither in laid nor cleared away
        if t.numel() < min_numel:
            return like
        self.laid.append(t)
        return t

    def close(self) -> None:
        for t in self.laid:
            self.cache.clear_away(t)
        self.laid.clear()

    def __enter__(self) -> "StashGroup":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class RegionScope:
    """Collects the rows of the regions inside, for nested checkpoints."""

    def __init__(self, bank: RngBank, nested: bool = False):
        self.bank = bank
        self.nested = nested
        self.rows: list[int] = []
        self.own: int | None = None
        self._token = None

    def __enter__(self) -> "RegionScope":
        self._token = _current.set(self)
        self.own = self.bank.snap()  # leak: __exit__ of a nested scope returns before forget
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        _current.reset(self._token)
        for row in self.rows:
            self.bank.forget(row)
        self.rows.clear()
        if self.nested:
            return False
        self.bank.forget(self.own)
        return False

    def note(self) -> int:
        row = self.bank.snap()  # clean: near miss, in rows, which __exit__ forgets on each path
        self.rows.append(row)
        return row


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn: Callable, bank: RngBank, cache: StashCache, keep: bool, x: torch.Tensor):
        ctx.fn, ctx.bank, ctx.cache, ctx.keep = fn, bank, cache, keep
        ctx.row = bank.snap()  # clean: near miss, backward() forgets it
        ctx.x = cache.lay(x) if keep else x  # clean: near miss, backward() clears it away under the same flag
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, g):
        ctx.bank.play(ctx.row)
        ctx.bank.forget(ctx.row)
        x = ctx.x.detach().clone().requires_grad_()
        if ctx.keep:
            ctx.cache.clear_away(ctx.x)
        ctx.x = None
        with torch.enable_grad():
            y = ctx.fn(x)
        y.backward(g)
        return None, None, None, None, x.grad


class _RecomputeTwice(torch.autograd.Function):
    """Second-order variant that runs fn again for the input gradient only."""

    @staticmethod
    def forward(ctx, fn, bank: RngBank, x, w):
        ctx.fn, ctx.bank = fn, bank
        ctx.row = bank.snap()  # leak: backward() returns before forget when x needs no gradient
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return fn(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        ctx.bank.play(ctx.row)
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x.detach(), w)
        (gw,) = torch.autograd.grad(y, w, g)
        if not ctx.needs_input_grad[2]:
            return None, None, None, gw
        ctx.bank.forget(ctx.row)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x, w.detach())
        (gx,) = torch.autograd.grad(y, x, g)
        return None, None, gx, gw


class CheckpointedBlock(nn.Module):
    def __init__(self, inner: nn.Module, bank: RngBank, cache: StashCache, keep: bool = True):
        super().__init__()
        self.inner = inner
        self.bank = bank
        self.cache = cache
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self.inner(x)
        return _Recompute.apply(self.inner, self.bank, self.cache, self.keep, x)

    def replayable(self, x: torch.Tensor, tries: int = 3) -> bool:
        for _ in range(tries):
            row = self.bank.snap()  # leak: a try that differs snaps again without forget
            a = self.inner(x)
            self.bank.play(row)
            if torch.equal(a, self.inner(x)):
                self.bank.forget(row)
                return True
        return False

    def with_inputs(self, x: torch.Tensor, owned: bool) -> torch.Tensor:
        """``owned`` says that x came from the cache and is ours to clear away."""
        try:
            return self.inner(x)
        finally:
            if owned:
                self.cache.clear_away(x)

    def run_copy(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_inputs(self.cache.lay(x), owned=True)  # clean: near miss, with_inputs() clears it away

    def run_view(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_inputs(self.cache.lay(x), owned=self.keep)  # leak: without keep nobody clears it away


def nested_regions(blocks, bank: RngBank, x: torch.Tensor) -> torch.Tensor:
    scope = _current.get()
    if scope is None:
        with RegionScope(bank) as scope:  # clean: near miss, not nested and so __exit__ forgets its row
            return nested_regions(blocks, bank, x)
    for block in blocks:
        scope.note()  # clean: near miss, result ignored but the scope has it
        x = block(x)
    return x
