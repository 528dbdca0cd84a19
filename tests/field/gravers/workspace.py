"""Sampler and attention workspaces: tensors borrowed from a size-bucketed pool."""
from __future__ import annotations

import functools
from typing import Callable, Optional, Sequence, TypeVar

import torch

T = TypeVar("T")


class WorkspacePool:
    def __init__(self, device: str = "cuda"):
        self.device = device
        self._buckets: dict[int, list[torch.Tensor]] = {}
        self.borrowed_bytes = 0

    @staticmethod
    def _round(numel: int) -> int:
        return 1 << max(8, (numel - 1).bit_length())

    def borrow(self, numel: int) -> torch.Tensor:
        size = self._round(numel)
        bucket = self._buckets.setdefault(size, [])
        t = bucket.pop() if bucket else torch.empty(size, device=self.device)
        self.borrowed_bytes += t.numel() * 4
        return t

    def give(self, t: torch.Tensor) -> None:
        self.borrowed_bytes -= t.numel() * 4
        self._buckets[t.numel()].append(t)


_pool: Optional[WorkspacePool] = None


def workspace() -> WorkspacePool:
    global _pool
    if _pool is None:
        _pool = WorkspacePool()
    return _pool


def sorted_probs(logits: torch.Tensor) -> torch.Tensor:
    """Sorted probabilities in a borrowed tensor. The caller gives it back."""
    out = workspace().borrow(logits.numel())  # clean: the caller's by the contract
    probs = torch.softmax(logits.flatten(), dim=-1)
    out[: probs.numel()].copy_(torch.sort(probs, descending=True).values)
    return out


def top_p_cutoff(logits: torch.Tensor, p: float) -> float:
    ranked = sorted_probs(logits)  # leak: the loop returns the cutoff before give
    total = 0.0
    for value in ranked[: logits.numel()].tolist():
        total += value
        if total >= p:
            return value
    workspace().give(ranked)
    return 0.0


def min_p_cutoff(logits: torch.Tensor, p: float) -> float:
    ranked = sorted_probs(logits)  # clean: given back after the item is read
    cutoff = float(ranked[0]) * p
    workspace().give(ranked)
    return cutoff


def entropy(logits: torch.Tensor) -> torch.Tensor:
    probs = sorted_probs(logits)[: logits.numel()].clone()  # leak: a copy is kept, the original dropped
    return -(probs * probs.clamp_min(1e-9).log()).sum()


def borrowed(numel: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Gives the function a workspace as its first argument."""

    def wrap(fn: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(fn)
        def inner(*args, **kwargs) -> T:
            ws = workspace().borrow(numel)  # clean: given back in finally round the call
            try:
                return fn(ws, *args, **kwargs)
            finally:
                workspace().give(ws)

        return inner

    return wrap


@borrowed(1 << 16)
def gumbel_sample(ws: torch.Tensor, logits: torch.Tensor) -> int:
    n = logits.numel()
    noise = ws[:n].exponential_()
    return int(torch.argmax(torch.softmax(logits.flatten(), -1) / noise))


class PenaltyState:
    """Token counts for one request. With `owns` the counts were borrowed here."""

    def __init__(self, vocab: int, counts: Optional[torch.Tensor] = None):
        self.owns = counts is None
        self.vocab = vocab
        self.counts = workspace().borrow(vocab) if counts is None else counts  # clean: near miss, owns guards
        self.counts.zero_()

    def update(self, token: int) -> None:
        self.counts[token] += 1

    def close(self) -> None:
        if self.owns:
            workspace().give(self.counts)


class BiasState:
    def __init__(self, vocab: int, bias: dict[int, float]):
        self.active = bool(bias)
        self.values = workspace().borrow(vocab)  # leak: close gives it back only if there was a bias
        self.values.zero_()
        for token, value in bias.items():
            self.values[token] = value

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.values[: logits.numel()] if self.active else logits

    def close(self) -> None:
        if self.active:
            workspace().give(self.values)


class Sampler:
    def __init__(self, pool: WorkspacePool, vocab: int):
        self.pool = pool
        self.vocab = vocab
        self.states: dict[str, PenaltyState] = {}

    def add(self, rid: str) -> None:
        if rid not in self.states:
            self.states[rid] = PenaltyState(self.vocab)  # clean: remove closes the state

    def remove(self, rid: str) -> None:
        state = self.states.pop(rid, None)
        if state is not None:
            state.close()

    def replay(self, tokens: Sequence[int], limit: int) -> float:
        state = PenaltyState(self.vocab)  # leak: more than the limit returns with the state open
        for i, token in enumerate(tokens):
            if i >= limit:
                return float(state.counts.max())
            state.update(token)
        peak = float(state.counts.max())
        state.close()
        return peak

    def split_k(self, rows: int, splits: int, scores: torch.Tensor) -> torch.Tensor:
        partial = self.pool.borrow(rows * splits)  # clean: given back on both branches
        if splits == 1:
            self.pool.give(partial)
            return scores
        lse = self.pool.borrow(splits)  # leak: only the partial sums are given back
        view = partial[: rows * splits].view(rows, splits)
        view.copy_(scores.view(rows, splits))
        lse[:splits].copy_(torch.logsumexp(view, dim=0))
        merged = (view.sum(dim=1) - lse[0]).clone()
        self.pool.give(partial)
        return merged

    def grow(self, buf: torch.Tensor, need: int) -> torch.Tensor:
        """Takes over `buf` and answers with one of `need` elements."""
        if buf.numel() >= need:
            return buf
        bigger = self.pool.borrow(need)  # clean: near miss, the old one is given back and this one handed on
        bigger[: buf.numel()].copy_(buf)
        self.pool.give(buf)
        return bigger

    def gather(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        buf = self.pool.borrow(256)  # clean: near miss, grow takes it over
        used = 0
        for chunk in chunks:
            buf = self.grow(buf, used + chunk.numel())  # clean: grow took the old one, given back below
            buf[used: used + chunk.numel()].copy_(chunk)
            used += chunk.numel()
        result = buf[:used].clone()
        self.pool.give(buf)
        return result
