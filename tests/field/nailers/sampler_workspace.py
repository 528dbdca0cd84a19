"""Sampling kernels' workspaces. One arena per process, used by plain functions."""
from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional, TypeVar

import torch

T = TypeVar("T")

_ALIGN = 256


class Span(NamedTuple):
    offset: int
    nbytes: int


class _Arena:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.holes: list[Span] = [Span(0, nbytes)]
        self.storage: Optional[torch.Tensor] = None

    def carve(self, nbytes: int) -> Optional[Span]:
        need = -(-nbytes // _ALIGN) * _ALIGN
        for i, hole in enumerate(self.holes):
            if hole.nbytes >= need:
                rest = Span(hole.offset + need, hole.nbytes - need)
                self.holes[i:i + 1] = [rest] if rest.nbytes else []
                return Span(hole.offset, need)
        return None

    def uncarve(self, span: Span) -> None:
        self.holes.append(span)
        self.holes.sort()
        merged: list[Span] = []
        for hole in self.holes:
            if merged and merged[-1].offset + merged[-1].nbytes == hole.offset:
                merged[-1] = Span(merged[-1].offset, merged[-1].nbytes + hole.nbytes)
            else:
                merged.append(hole)
        self.holes = merged

    def tensor(self, span: Span, dtype: torch.dtype) -> torch.Tensor:
        if self.storage is None:
            self.storage = torch.empty(self.nbytes, dtype=torch.uint8)
        return self.storage[span.offset:span.offset + span.nbytes].view(dtype)


_ARENA = _Arena(64 << 20)
_SEEDS: list[int] = list(range(1 << 10))
_seeded: dict[str, int] = {}


def take_seed() -> Optional[int]:
    """Philox stream id; give it back with return_seed()."""
    return _SEEDS.pop() if _SEEDS else None


def return_seed(seed: int) -> None:
    _SEEDS.append(seed)


def workspace(nbytes: int) -> Span:
    """A span of the arena, or MemoryError."""
    span = _ARENA.carve(nbytes)  # clean: handed to the caller when it is one
    if span is None:
        raise MemoryError(f"sampling arena has no {nbytes} contiguous bytes")
    return span


def float_workspace(rows: int, cols: int) -> tuple[Span, torch.Tensor]:
    span = workspace(4 * rows * cols)  # clean: handed to the caller with its view
    return span, _ARENA.tensor(span, torch.float32)[:rows * cols].view(rows, cols)


def release_workspace(span: Optional[Span]) -> None:
    if span is not None:
        _ARENA.uncarve(span)


def with_workspace(nbytes: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: the function gets a span as its first argument for the length of the call."""

    def wrap(fn: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(fn)
        def inner(*args: object, **kwargs: object) -> T:
            span = workspace(nbytes)  # clean: released in finally
            try:
                return fn(span, *args, **kwargs)
            finally:
                release_workspace(span)
        return inner
    return wrap


def seed_request(rid: str) -> bool:
    if rid in _seeded:
        return True
    seed = take_seed()  # clean: in _seeded until unseed_request()
    if seed is None:
        return False
    _seeded[rid] = seed
    return True


def unseed_request(rid: str) -> None:
    seed = _seeded.pop(rid, None)
    if seed is not None:
        return_seed(seed)


def reseed_request(rid: str) -> bool:
    """New stream for a request whose sampling parameters changed."""
    seed = take_seed()  # leak: a request that was never seeded returns False with the new seed taken
    if seed is None:
        return False
    old = _seeded.get(rid)
    if old is None:
        return False
    return_seed(old)
    _seeded[rid] = seed
    return True


def apply_temperature(logits: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    span, scratch = float_workspace(*logits.shape)  # clean: released after the copy out
    torch.div(logits, temps.clamp_min(1e-5)[:, None], out=scratch)
    out = scratch.clone()
    release_workspace(span)
    return out


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    _, scratch = float_workspace(*logits.shape)  # leak: the span is discarded, so it cannot be released
    torch.sub(logits, logits.logsumexp(dim=-1, keepdim=True), out=scratch)
    return scratch.clone()


def top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    span, probs = float_workspace(*logits.shape)  # leak: rows with p >= 1 return the logits early
    if bool((p >= 1.0).all()):
        return logits
    order = logits.argsort(dim=-1, descending=True)
    probs.copy_(logits.gather(-1, order).softmax(dim=-1))
    drop = probs.cumsum(dim=-1) - probs > p[:, None]
    release_workspace(span)
    return logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))


def min_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    span: Optional[Span] = None
    if p > 0.0:
        span, probs = float_workspace(*logits.shape)  # clean: near miss, release_workspace() passes None by
        probs.copy_(logits.softmax(dim=-1))
        floor = probs.amax(dim=-1, keepdim=True) * p
        logits = logits.masked_fill(probs < floor, float("-inf"))
    release_workspace(span)
    return logits


def penalties(logits: torch.Tensor, seen: list[list[int]], repetition: float) -> torch.Tensor:
    in_place = repetition == 1.0
    span = None
    if not in_place:
        span = workspace(logits.numel())  # clean: near miss, in_place does not change until the release
    out = logits if in_place else logits.clone()
    for row, tokens in enumerate(seen):
        for token in set(tokens):
            value = out[row, token]
            out[row, token] = value / repetition if value > 0 else value * repetition
    if not in_place:
        release_workspace(span)
    return out


@with_workspace(1 << 16)
def count_bins(span: Span, tokens: torch.Tensor) -> torch.Tensor:
    bins = _ARENA.tensor(span, torch.int32)
    bins.zero_()
    bins.scatter_add_(0, tokens.long() % bins.numel(), torch.ones_like(tokens, dtype=torch.int32))
    return bins.clone()


def sample_beams(logits: torch.Tensor, width: int, steps: int) -> list[torch.Tensor]:
    """Beam scores per step, each step reading the previous one's workspace."""
    scores: list[torch.Tensor] = []
    previous: Optional[Span] = None
    for _ in range(steps):
        span, buf = float_workspace(*logits.shape)  # clean: near miss, released one pass later or at the end
        buf.copy_(logits.log_softmax(dim=-1))
        scores.append(buf.topk(width, dim=-1).values.clone())
        release_workspace(previous)
        previous = span
    release_workspace(previous)
    return scores


def rejection_sample(draft: torch.Tensor, target: torch.Tensor, tries: int) -> Optional[torch.Tensor]:
    for attempt in range(tries):
        span, ratio = float_workspace(*draft.shape)  # leak: an attempt that rejects continues with its span
        torch.div(target, draft.clamp_min(1e-6), out=ratio)
        accept = ratio > torch.rand_like(draft)
        if not bool(accept.any()):
            continue
        chosen = accept.float().argmax(dim=-1)
        release_workspace(span)
        return chosen
    return None
