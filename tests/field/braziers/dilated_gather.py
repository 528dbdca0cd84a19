"""Segment gathering for dilated attention (several segment lengths and rates per layer)."""
from __future__ import annotations

from collections import defaultdict
from typing import Iterator, Optional, Sequence

import torch
import torch.nn.functional as F


class SegmentPool:
    """Hands out row-major scratch tensors, bucketed by shape."""

    def __init__(self, device: str = "cpu", limit_per_shape: int = 32) -> None:
        self.device = device
        self.limit = limit_per_shape
        self._idle: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self._made: dict[tuple[int, int], int] = defaultdict(int)

    def take(self, rows: int, cols: int) -> torch.Tensor:
        shape = (rows, cols)
        if self._idle[shape]:
            return self._idle[shape].pop()
        if self._made[shape] >= self.limit:
            raise RuntimeError(f"segment pool exhausted for {shape}")
        self._made[shape] += 1
        return torch.empty(shape, device=self.device)

    def give(self, t: torch.Tensor) -> None:
        self._idle[(t.shape[0], t.shape[1])].append(t)


def gather_segment(pool: SegmentPool, x: torch.Tensor, start: int, length: int, rate: int) -> torch.Tensor:
    """Every ``rate``-th row of ``x[start:start+length]`` in a pooled tensor."""
    picked = x[start:start + length:rate]
    seg = pool.take(picked.shape[0], picked.shape[1])  # clean: handed to the caller
    seg.copy_(picked)
    return seg


def iter_segments(pool: SegmentPool, x: torch.Tensor, length: int, rate: int) -> Iterator[torch.Tensor]:
    """Yield pooled segments; whoever iterates gives them back."""
    for start in range(0, x.shape[0], length):
        yield gather_segment(pool, x, start, length, rate)  # clean: near miss, yielded to the consumer


def attend(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    scores = q @ kv.t() * q.shape[-1] ** -0.5
    return F.softmax(scores, dim=-1) @ kv


def dilated_layer(pool: SegmentPool, x: torch.Tensor, plan: Sequence[tuple[int, int]]) -> torch.Tensor:
    out = torch.zeros_like(x)
    weight = 1.0 / max(1, len(plan))
    for length, rate in plan:
        for start in range(0, x.shape[0], length):
            seg = gather_segment(pool, x, start, length, rate)  # leak: copied into out and dropped
            out[start:start + length:rate] += weight * attend(seg, seg)
    return out


def dilated_layer_v2(pool: SegmentPool, x: torch.Tensor, plan: Sequence[tuple[int, int]]) -> torch.Tensor:
    out = torch.zeros_like(x)
    weight = 1.0 / max(1, len(plan))
    for length, rate in plan:
        start = 0
        for seg in iter_segments(pool, x, length, rate):  # clean: each yielded segment is given back
            out[start:start + length:rate] += weight * attend(seg, seg)
            pool.give(seg)
            start += length
    return out


def segment_norms(pool: SegmentPool, x: torch.Tensor, length: int, rate: int) -> list[float]:
    norms: list[float] = []
    for seg in iter_segments(pool, x, length, rate):  # leak: single-row segments skip the give
        if seg.shape[0] < 2:
            norms.append(0.0)
            continue
        centred = seg - seg.mean(0, keepdim=True)
        norms.append(float(centred.norm()))
        pool.give(seg)
    return norms


def head_summary(pool: SegmentPool, x: torch.Tensor, rate: int) -> torch.Tensor:
    return gather_segment(pool, x, 0, x.shape[0], rate).mean(0)  # leak: only the mean survives


def rate_table(pool: SegmentPool, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Peak activation per dilation rate; ``pairs`` may name a rate more than once."""
    by_rate: dict[int, torch.Tensor] = {}
    for length, rate in pairs:
        buf = by_rate.setdefault(rate, pool.take(x.shape[0], x.shape[1]))  # leak: lost if present
        buf[:length].copy_(x[:length])
    peaks = {rate: float(t.abs().max()) for rate, t in by_rate.items()}
    for t in by_rate.values():
        pool.give(t)
    return peaks


def rate_table_lazy(pool: SegmentPool, x: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> dict[int, float]:
    by_rate: dict[int, torch.Tensor] = {}
    for length, rate in pairs:
        buf = by_rate.get(rate)
        if buf is None:
            buf = by_rate[rate] = pool.take(x.shape[0], x.shape[1])  # clean: near miss, the dict is drained below
        buf[:length].copy_(x[:length])
    peaks: dict[int, float] = {}
    while by_rate:
        rate, t = by_rate.popitem()
        peaks[rate] = float(t.abs().max())
        pool.give(t)
    return peaks


def sum_of_rates(pool: SegmentPool, x: torch.Tensor, rates: Sequence[int]) -> torch.Tensor:
    """Accumulates into the first gathered tensor and returns a copy of it."""
    rows = x.shape[0] // max(rates)
    segs = [gather_segment(pool, x, 0, rows * r, r) for r in rates]  # leak: the first one is never given
    total = segs[0]
    for seg in segs[1:]:
        total.add_(seg)
        pool.give(seg)
    return total.clone()


def fold_rates(pool: SegmentPool, x: torch.Tensor, rates: Sequence[int]) -> torch.Tensor:
    """As sum_of_rates, but the caller gets the pooled accumulator itself."""
    rows = x.shape[0] // max(rates)
    total, *rest = [gather_segment(pool, x, 0, rows * r, r) for r in rates]  # clean: rest given, total returned
    for seg in rest:
        total.add_(seg)
        pool.give(seg)
    return total


def folded_logits(pool: SegmentPool, x: torch.Tensor, w: torch.Tensor, rates: Sequence[int]) -> torch.Tensor:
    acc = fold_rates(pool, x, rates)  # clean: given back after the projection
    logits = acc @ w
    pool.give(acc)
    return logits


def scatter_back(
    pool: SegmentPool, seg: torch.Tensor, n: int, rate: int, out: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Upsample ``seg`` to n rows; works in ``out`` when given."""
    work = out if out is not None else pool.take(n, seg.shape[1])  # clean: near miss, same test below
    work.zero_()
    work[::rate].copy_(seg)
    smoothed = F.avg_pool1d(work.t().unsqueeze(0), rate, stride=1).squeeze(0).t()
    result = smoothed.contiguous()
    if out is None:
        pool.give(work)
    return result


def upsample_pair(pool: SegmentPool, a: torch.Tensor, b: torch.Tensor, n: int) -> torch.Tensor:
    wide_a = pool.take(n, a.shape[1])  # clean: given below
    wide_b = pool.take(n, b.shape[1])  # leak: wide_a is given twice in its place
    wide_a.copy_(a.repeat_interleave(n // a.shape[0], 0))
    wide_b.copy_(b.repeat_interleave(n // b.shape[0], 0))
    mixed = wide_a + wide_b
    pool.give(wide_a)
    pool.give(wide_a)
    return mixed
