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
from reference_modules.attention.workspace import Pool, temporary

_SCORES_PER_BLOCK = 1 << 22
_NO_KEYS = 1e30


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
        generator = self._generator(q.device)
        for b, rows in _blocks(q, k):
            with temporary(self.pool, _scores_shape(q, k, b, rows), work, q.device) as p:
                _scores(p, _part(x, q, k, b, rows), rows.start)
                largest = p.amax(-1, keepdim=True)
                total = p.sub_(finite_lse(largest)).exp_().sum(-1, keepdim=True)
                lse_BHL[b, :, rows] = (total.log() + largest).squeeze(-1)
                self._drop(p, generator)
                out_BHLD[b, :, rows] = p @ v[b] / total.masked_fill_(largest == -math.inf, 1.0)
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
        generator = self._generator(q.device)
        for b, rows in _blocks(q, k):
            shape = _scores_shape(q, k, b, rows)
            with (
                temporary(self.pool, shape, work, q.device) as p,
                temporary(self.pool, shape, work, q.device) as ds,
            ):
                _scores(p, _part(x, q, k, b, rows), rows.start)
                p.sub_(lse_BHL1[b, :, rows]).exp_()
                torch.matmul(do[b, :, rows], v[b].mT, out=ds)
                if (kept := self._kept(p, generator)) is not None:
                    ds.mul_(kept)
                    dv[b] += (p * kept).mT @ do[b, :, rows]
                else:
                    dv[b] += p.mT @ do[b, :, rows]
                ds.sub_(delta_BHL1[b, :, rows]).mul_(p)
                dq[b, :, rows] = ds @ k[b] * x.scale
                dk[b] += ds.mT @ q[b, :, rows] * x.scale
        return dq, dk, dv

    def _generator(self, device: torch.device) -> torch.Generator | None:
        """Backward draws the same dropout again: it walks the same blocks from the same seed."""
        dropping = self.seed is not None and self.dropout > 0.0
        return torch.Generator(device).manual_seed(cast(int, self.seed)) if dropping else None

    def _kept(self, p_BHLS: Tensor, generator: torch.Generator | None) -> Tensor | None:
        return None if generator is None else _factors(p_BHLS, self.dropout, generator)

    def _drop(self, p_BHLS: Tensor, generator: torch.Generator | None) -> None:
        if (kept := self._kept(p_BHLS, generator)) is not None:
            p_BHLS.mul_(kept)


def drawn(p: Tensor, dropout: float, seed: int | None) -> Tensor | None:
    """What dropout multiplies probabilities by, the same for the same seed; None where nothing drops."""
    if dropout == 0.0 or seed is None:
        return None
    return _factors(p, dropout, torch.Generator(p.device).manual_seed(seed))


def _factors(p: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    kept = torch.empty_like(p).bernoulli_(1.0 - dropout, generator=generator)
    return kept.div_(1.0 - dropout)


def finite_lse(lse: Tensor) -> Tensor:
    """For rows without keys: with 1e30 in place of −inf every exp(score − lse) is 0, and not NaN."""
    return lse.masked_fill(lse == float("-inf"), _NO_KEYS)


def _blocks(q_BHLD: Tensor, k_BHSD: Tensor) -> Iterator[tuple[slice, slice]]:
    """Some segments and some of their rows at a time."""
    segments, heads, rows, _ = q_BHLD.shape
    at_once = max(1, min(rows, _SCORES_PER_BLOCK // (heads * k_BHSD.shape[2])))
    together = max(1, _SCORES_PER_BLOCK // (heads * at_once * k_BHSD.shape[2])) if at_once == rows else 1
    for b in range(0, segments, together):
        for row in range(0, rows, at_once):
            yield slice(b, min(b + together, segments)), slice(row, min(row + at_once, rows))


def _scores_shape(q: Tensor, k: Tensor, b: slice, rows: slice) -> tuple[int, int, int, int]:
    return (b.stop - b.start, q.shape[1], rows.stop - rows.start, k.shape[2])


def _part(x: Operands, q_BHLD: Tensor, k_BHSD: Tensor, b: slice, rows: slice) -> Operands:
    """Some segments' rows against all their keys, in the type of q and k as given."""
    keys = None if x.keys_BHS is None else x.keys_BHS[b]
    return replace(x, q_BHLD=q_BHLD[b, :, rows], k_BHSD=k_BHSD[b], keys_BHS=keys)


def _scores(into_BHLS: Tensor, x: Operands, first_row: int) -> None:
    torch.matmul(x.q_BHLD, x.k_BHSD.mT, out=into_BHLS).mul_(x.scale)
    if x.keys_BHS is not None:
        into_BHLS.masked_fill_(~x.keys_BHS.unsqueeze(2), float("-inf"))
    if x.causal:
        rows, columns = into_BHLS.shape[2:]
        row = torch.arange(first_row, first_row + rows, device=into_BHLS.device)
        later_LS = torch.arange(columns, device=into_BHLS.device) > row.unsqueeze(1)
        into_BHLS.masked_fill_(later_LS, float("-inf"))
