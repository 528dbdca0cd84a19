"""Per-request sampling state (penalty rows, random generators) in a dense table."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    seed: Optional[int] = None

    @property
    def needs_penalty(self) -> bool:
        return self.presence_penalty != 0.0


class RowAllocator:
    def __init__(self, rows: int):
        self._top = 0
        self._recycled: list[int] = []
        self.rows = rows

    def alloc_row(self) -> int:
        if self._recycled:
            return self._recycled.pop()
        if self._top == self.rows:
            raise OverflowError("sampling table full")
        self._top += 1
        return self._top - 1

    def free_row(self, row: int) -> None:
        self._recycled.append(row)


class SamplerTable:
    def __init__(self, rows: int, vocab: int) -> None:
        self.alloc = RowAllocator(rows)
        self.counts = torch.zeros(rows, vocab, dtype=torch.int32)
        self.params: dict[str, SamplingParams] = {}
        self.rows: dict[str, int] = {}
        self.bias_rows: dict[str, int] = {}

    def add(self, rid: str, params: SamplingParams) -> None:
        self.params[rid] = params
        if params.needs_penalty:
            self.rows[rid] = self.alloc.alloc_row()  # clean: near miss, remove() asks the same property
            self.counts[self.rows[rid]].zero_()

    def add_bias(self, rid: str, bias: dict[int, float]) -> None:
        row = self.alloc.alloc_row()  # leak: an empty bias leaves the row unused and unrecorded
        if not bias:
            return
        self.counts[row].zero_()
        for tok in bias:
            self.counts[row, tok] = 1
        stale = self.bias_rows.pop(rid, None)
        if stale is not None:
            self.alloc.free_row(stale)
        self.bias_rows[rid] = row

    def remove(self, rid: str) -> None:
        params = self.params.pop(rid)
        if params.needs_penalty:
            self.alloc.free_row(self.rows.pop(rid))
        bias = self.bias_rows.pop(rid, None)
        if bias is not None:
            self.alloc.free_row(bias)

    def record(self, rid: str, token: int) -> None:
        row = self.rows.get(rid)
        if row is not None:
            self.counts[row, token] += 1

    def apply(self, rid: str, logits: torch.Tensor) -> torch.Tensor:
        p = self.params[rid]
        row = self.rows.get(rid)
        if row is not None:
            logits = logits - p.presence_penalty * (self.counts[row] > 0)
        return logits / max(p.temperature, 1e-5)

    def sample(self, rid: str, logits: torch.Tensor) -> int:
        p = self.params[rid]
        probs = torch.softmax(self.apply(rid, logits), -1)
        if p.top_p < 1.0:
            probs = self._nucleus(probs, p.top_p)
        gen = torch.Generator().manual_seed(p.seed) if p.seed is not None else None
        tok = int(torch.multinomial(probs, 1, generator=gen))
        self.record(rid, tok)
        return tok

    def _nucleus(self, probs: torch.Tensor, top_p: float) -> torch.Tensor:
        row = self.alloc.alloc_row()  # clean: freed after the mask is built
        vals, idx = probs.sort(descending=True)
        keep = vals.cumsum(-1) - vals < top_p
        self.counts[row].zero_()
        self.counts[row, idx[keep]] = 1
        out = probs * self.counts[row]
        self.alloc.free_row(row)
        return out / out.sum()

    def min_p(self, probs: torch.Tensor, p: float) -> torch.Tensor:
        row = self.alloc.alloc_row()  # leak: a mask that keeps everything returns probs and forgets the row
        self.counts[row] = (probs >= p * probs.max()).int()
        if bool(self.counts[row].all()):
            return probs
        out = probs * self.counts[row]
        self.alloc.free_row(row)
        return out / out.sum()

    def swap(self, a: str, b: str) -> None:
        tmp = self.alloc.alloc_row()  # clean: scratch row for the exchange
        ra, rb = self.rows[a], self.rows[b]
        self.counts[tmp].copy_(self.counts[ra])
        self.counts[ra].copy_(self.counts[rb])
        self.counts[rb].copy_(self.counts[tmp])
        self.alloc.free_row(tmp)

    def compact(self) -> int:
        """Moves rows to lower numbers."""
        moved = 0
        for rid, row in list(self.rows.items()):
            low = self.alloc.alloc_row()  # clean: near miss, one of the two rows is freed in either branch
            if low >= row:
                self.alloc.free_row(low)
                continue
            self.counts[low].copy_(self.counts[row])
            self.alloc.free_row(row)
            self.rows[rid] = low
            moved += 1
        return moved
