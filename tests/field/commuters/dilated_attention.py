"""LongNet-style dilated attention on a bump arena with marks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn


@dataclass
class Span:
    start: int
    length: int
    view: torch.Tensor


class ScratchHeap:
    """First-fit over one flat tensor; neighbouring holes are merged when a span comes home."""

    def __init__(self, numel: int) -> None:
        self.flat = torch.empty(numel)
        self._holes: list[tuple[int, int]] = [(0, numel)]

    def carve(self, *shape: int) -> Optional[Span]:
        need = 1
        for s in shape:
            need *= s
        for i, (start, length) in enumerate(self._holes):
            if length < need:
                continue
            self._holes.pop(i)  # clean: the rest of the hole is put back, the front becomes the span
            if length > need:
                self._holes.insert(i, (start + need, length - need))
            return Span(start, need, self.flat[start:start + need].view(*shape))
        return None

    def come_home(self, span: Span) -> None:
        self._holes.append((span.start, span.length))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._holes = merged


class DilatedAttention(nn.Module):
    def __init__(self, dim: int, segments: list[int], rates: list[int], heap: ScratchHeap) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.segments = segments
        self.rates = rates
        self.heap = heap
        self.dim = dim
        self._denom: Optional[Span] = None

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.T / self.dim ** 0.5, -1) @ v

    def _gathered(self, x: torch.Tensor, rate: int) -> Optional[Span]:
        picked = x[::rate]
        span = self.heap.carve(*picked.shape)  # clean: returned to the caller
        if span is not None:
            span.view.copy_(picked)
        return span

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        out = torch.zeros_like(x)
        for seg, rate in zip(self.segments, self.rates):
            for s in range(0, x.shape[0], seg):
                ks = self._gathered(k[s:s + seg], rate)  # clean: comes home in both branches
                vs = self._gathered(v[s:s + seg], rate)  # clean: near miss, alone it comes home in the fallback branch
                if ks is None or vs is None:
                    for span in (ks, vs):
                        if span is not None:
                            self.heap.come_home(span)
                    out[s:s + seg] += self._dense(q[s:s + seg], k[s:s + seg], v[s:s + seg])
                    continue
                out[s:s + seg] += self._dense(q[s:s + seg], ks.view, vs.view)
                self.heap.come_home(vs)
                self.heap.come_home(ks)
        return out

    def forward_sparse(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        out = torch.zeros_like(x)
        for seg, rate in zip(self.segments, self.rates):
            for s in range(0, x.shape[0], seg):
                ks = self._gathered(k[s:s + seg], rate)  # leak: a segment with nothing to keep continues past come_home
                if ks is None:
                    break
                if not keep[s:s + seg].any():
                    continue
                out[s:s + seg] += self._dense(q[s:s + seg], ks.view, v[s:s + seg:rate])
                self.heap.come_home(ks)
        return out

    def set_denominator(self, length: int) -> bool:
        if self._denom is not None:
            if self._denom.length == length:
                return True
            self.heap.come_home(self._denom)
        self._denom = self.heap.carve(length)  # clean: near miss, a span of another length has just come home
        return self._denom is not None

    def widen_denominator(self, extra: int) -> bool:
        length = extra + (self._denom.length if self._denom else 0)
        wider = self.heap.carve(length)  # leak: the narrower span in the field is overwritten
        if wider is None:
            return False
        if self._denom is not None:
            wider.view[: self._denom.length] = self._denom.view
        self._denom = wider
        return True

    def clear_denominator(self) -> None:
        if self._denom is not None:
            self.heap.come_home(self._denom)
            self._denom = None


def segment_scores(attn: DilatedAttention, x: torch.Tensor, seg: int) -> Optional[torch.Tensor]:
    rows = (x.shape[0] + seg - 1) // seg
    table = attn.heap.carve(rows, seg)  # leak: a missing temporary ends the call with the table out
    if table is None:
        return None
    for r in range(rows):
        part = x[r * seg:(r + 1) * seg]
        tmp = attn.heap.carve(part.shape[0])  # clean: home again in the same round
        if tmp is None:
            return None
        tmp.view.copy_(part.sum(-1))
        table.view[r, : part.shape[0]] = tmp.view
        attn.heap.come_home(tmp)
    result = table.view.clone()
    attn.heap.come_home(table)
    return result


def causal_offsets(heap: ScratchHeap, lengths: list[int]) -> list[int]:
    span = heap.carve(len(lengths))  # clean: near miss, the empty early return is only taken when it is None
    if span is None:
        return []
    span.view.copy_(torch.tensor(lengths, dtype=torch.float32))
    offsets = span.view.cumsum(0).tolist()
    heap.come_home(span)
    return [int(o) for o in offsets]


def compare_rates(attn: DilatedAttention, x: torch.Tensor, rates: list[int]) -> int:
    best_rate, best_norm = 1, -1.0
    best: Optional[Span] = None
    for rate in rates:
        span = attn._gathered(x, rate)  # leak: the beaten best is rebound without coming home
        if span is None:
            continue
        norm = float(span.view.norm())
        if norm <= best_norm:
            attn.heap.come_home(span)
            continue
        best, best_rate, best_norm = span, rate, norm
    if best is not None:
        attn.heap.come_home(best)
    return best_rate
