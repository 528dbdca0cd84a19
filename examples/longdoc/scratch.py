"""Borrowed scratch tensors, and small computations that need one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from .memory_pool import TensorMemoryPool


def allocate_budget(total_bytes: int, parts: int) -> list[int]:
    """`total_bytes` in `parts` nearly equal shares."""
    share, rest = divmod(total_bytes, parts)
    return [share + (index < rest) for index in range(parts)]


def borrow_scores(pool: TensorMemoryPool, batch: int, heads: int, length: int) -> Tensor:
    """Scores for one window; the caller gives them back."""
    return pool.allocate((batch, heads, length, length))


def borrow_causal_mask(pool: TensorMemoryPool, length: int) -> Tensor:
    """True above the diagonal; the caller gives it back."""
    mask = pool.allocate((length, length), torch.bool)
    try:
        torch.triu(torch.ones(length, length, dtype=torch.bool), 1, out=mask)
    except BaseException:
        pool.deallocate(mask)
        raise
    return mask


def attention_entropy(pool: TensorMemoryPool, q: Tensor, k: Tensor) -> float:
    """Mean entropy of the attention rows: how spread out the model looks."""
    b, h, n, d = q.shape
    scores = borrow_scores(pool, b, h, n)
    torch.matmul(q, k.transpose(-1, -2), out=scores)
    log_probs = scores.mul_(d**-0.5).log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def attention_peak(pool: TensorMemoryPool, q: Tensor, k: Tensor) -> float:
    """The largest weight that any query gives to any key."""
    b, h, n, d = q.shape
    scores = borrow_scores(pool, b, h, n)
    try:
        torch.matmul(q, k.transpose(-1, -2), out=scores)
        return float(scores.mul_(d**-0.5).softmax(-1).max())
    finally:
        pool.deallocate(scores)


def mean_of_chunks(pool: TensorMemoryPool, chunks: Sequence[Tensor]) -> Tensor:
    """Mean over equally shaped chunks, summed in pooled memory."""
    packed = pool.allocate((len(chunks), *chunks[0].shape), chunks[0].dtype)
    for slot, chunk in zip(packed, chunks, strict=True):
        if chunk.shape != slot.shape:
            raise ValueError(f"a chunk is {tuple(chunk.shape)}, the first was {tuple(slot.shape)}")
        slot.copy_(chunk)
    mean = packed.mean(0)
    pool.deallocate(packed)
    return mean


def pairwise_distances(pool: TensorMemoryPool, left: Tensor, right: Tensor) -> Tensor:
    """Euclidean distance of every row of `left` to every row of `right`."""
    with ExitStack() as stack:
        products = pool.allocate((len(left), len(right)), left.dtype)
        stack.callback(pool.deallocate, products)
        torch.matmul(left, right.T, out=products)
        norms = stack.enter_context(pool.lease((len(left), 1), left.dtype))
        torch.sum(left * left, 1, keepdim=True, out=norms)
        return (norms - 2 * products + (right * right).sum(1)).clamp_min(0).sqrt()


def sliding_windows(pool: TensorMemoryPool, x: Tensor, size: int, step: int) -> Iterator[Tensor]:
    """Copies of overlapping windows, all in one buffer: use each before asking for the next."""
    window = pool.allocate((x.shape[0], size, x.shape[2]), x.dtype)
    try:
        for start in range(0, x.shape[1] - size + 1, step):
            window.copy_(x[:, start : start + size])
            yield window
    finally:
        pool.deallocate(window)
