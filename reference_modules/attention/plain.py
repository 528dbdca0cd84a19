"""Attention over one tile in plain tensor operations: any type and device, dropout, a check on the others.

Works through blocks of rows so that the scores, which come from the pool, stay under a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from reference_modules.attention.operands import Operands
from reference_modules.attention.seeds import derived
from reference_modules.attention.workspace import Pool, temporary

_SCORES_PER_BLOCK = 1 << 22
_NO_KEYS = 1e30

Block = tuple[slice, slice, slice]  # segments, heads, rows


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision accumulates in float32."""
    return dtype if dtype == torch.float64 else torch.float32


class Plain:
    """softmax(scale·q·kᵀ)·v and its gradient, by hand."""

    name = "plain"

    def __init__(self, pool: Pool | None, dropout: float, seed: int | None) -> None:
        assert dropout == 0.0 or seed is not None
        self.pool, self.dropout, self.seed = pool, dropout, seed

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        work = accumulation_dtype(x.q_BHLD.dtype)
        q, k, v = (side.to(work) for side in (x.q_BHLD, x.k_BHSD, x.v_BHSD))
        out_BHLD = torch.empty_like(q)
        lse_BHL = q.new_empty(q.shape[:3])
        for block in _blocks(q, k):
            b, h, rows = block
            with temporary(self.pool, _scores_shape(k, block), work, q.device) as p:
                _scores(p, _part(x, q, k, block), rows.start)
                largest = p.amax(-1, keepdim=True)
                total = p.sub_(finite_lse(largest)).exp_().sum(-1, keepdim=True)
                lse_BHL[block] = (total.log() + largest).squeeze(-1)
                if (kept := self._kept(p, x, block)) is not None:
                    p.mul_(kept)
                out_BHLD[block] = p @ v[b, h] / total.masked_fill_(largest == -math.inf, 1.0)
        return out_BHLD, lse_BHL

    def backward(
        self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = accumulation_dtype(x.q_BHLD.dtype)
        q, k, v = (side.to(work) for side in (x.q_BHLD, x.k_BHSD, x.v_BHSD))
        do, out = dout_BHLD.to(work), out_BHLD.to(work)
        delta_BHL1 = (do * out).sum(-1, keepdim=True)
        lse_BHL1 = finite_lse(lse_BHL.to(work)).unsqueeze(-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in _blocks(q, k):
            b, h, rows = block
            shape = _scores_shape(k, block)
            with (
                temporary(self.pool, shape, work, q.device) as p,
                temporary(self.pool, shape, work, q.device) as ds,
            ):
                _scores(p, _part(x, q, k, block), rows.start)
                p.sub_(lse_BHL1[block]).exp_()
                torch.matmul(do[block], v[b, h].mT, out=ds)
                if (kept := self._kept(p, x, block)) is not None:
                    ds.mul_(kept)
                    dv[b, h] += (p * kept).mT @ do[block]
                else:
                    dv[b, h] += p.mT @ do[block]
                ds.sub_(delta_BHL1[block]).mul_(p)
                dq[block] = ds @ k[b, h] * x.scale
                dk[b, h] += ds.mT @ q[block] * x.scale
        return dq, dk, dv

    def _kept(self, p_BHLS: Tensor, x: Operands, block: Block) -> Tensor | None:
        """What dropout multiplies by, drawn for each segment's head by where it lies in the sequence.

        So backward draws the same again, and a call in halves the same as the whole.
        """
        if self.dropout == 0.0:
            return None
        assert x.places is not None
        places, (b, h, rows) = x.places(), block
        kept, generator = torch.empty_like(p_BHLS), torch.Generator(p_BHLS.device)
        for of_segment, kept_HLS in zip(places[b], kept, strict=True):
            for place, kept_LS in zip(of_segment[h], kept_HLS, strict=True):
                generator.manual_seed(cast(int, derived(self.seed, *place, rows.start)))
                kept_LS.bernoulli_(1.0 - self.dropout, generator=generator)
        return kept.div_(1.0 - self.dropout)


def drawn(p: Tensor, dropout: float, seed: int | None) -> Tensor | None:
    """What dropout multiplies probabilities by, the same for the same seed; None where nothing drops."""
    if dropout == 0.0 or seed is None:
        return None
    generator = torch.Generator(p.device).manual_seed(seed)
    kept = torch.empty_like(p).bernoulli_(1.0 - dropout, generator=generator)
    return kept.div_(1.0 - dropout)


def finite_lse(lse: Tensor) -> Tensor:
    """For rows without keys: with 1e30 in place of −inf every exp(score − lse) is 0, and not NaN."""
    return lse.masked_fill(lse == float("-inf"), _NO_KEYS)


def _blocks(q_BHLD: Tensor, k_BHSD: Tensor) -> Iterator[Block]:
    """Some segments, some of their heads, some of their rows at a time.

    How many rows follows from the keys alone: dropout draws them together, however a call was cut.
    """
    segments, heads, rows, _ = q_BHLD.shape
    keys = max(1, k_BHSD.shape[2])
    at_once = max(1, min(rows, _SCORES_PER_BLOCK // keys))
    heads_together = max(1, min(heads, _SCORES_PER_BLOCK // (at_once * keys)))
    together = max(1, _SCORES_PER_BLOCK // (heads * at_once * keys))
    for b in range(0, segments, together):
        for h in range(0, heads, heads_together):
            for row in range(0, rows, at_once):
                yield (
                    slice(b, min(b + together, segments)),
                    slice(h, min(h + heads_together, heads)),
                    slice(row, min(row + at_once, rows)),
                )


def _scores_shape(k_BHSD: Tensor, block: Block) -> tuple[int, ...]:
    return (*(part.stop - part.start for part in block), k_BHSD.shape[2])


def _part(x: Operands, q_BHLD: Tensor, k_BHSD: Tensor, block: Block) -> Operands:
    """A block of rows against all their keys, in the type of q and k as given."""
    b, h, _ = block
    keys = None if x.keys_BHS is None else x.keys_BHS[b, h]
    return replace(x, q_BHLD=q_BHLD[block], k_BHSD=k_BHSD[b, h], keys_BHS=keys)


def _scores(into_BHLS: Tensor, x: Operands, first_row: int) -> None:
    torch.matmul(x.q_BHLD, x.k_BHSD.mT, out=into_BHLS).mul_(x.scale)
    if x.keys_BHS is not None:
        into_BHLS.masked_fill_(~x.keys_BHS.unsqueeze(2), float("-inf"))
    if x.causal:
        rows, columns = into_BHLS.shape[2:]
        row = torch.arange(first_row, first_row + rows, device=into_BHLS.device)
        later_LS = torch.arange(columns, device=into_BHLS.device) > row.unsqueeze(1)
        into_BHLS.masked_fill_(later_LS, float("-inf"))
