"""One part of a softmax mixed into the sum of those before it, and the order in which CPU loops are fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Blend:
    """out −= σ(l_i − lse)·(out − o_i) and lse = logaddexp(lse, l_i), worked out first and applied later."""

    def __init__(self, out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> None:
        lse_i = lse_i.to(lse.dtype)
        new_lse = lse.clone(memory_format=torch.contiguous_format)  # strided, logaddexp takes 5 times as long
        share = torch.sigmoid(lse_i - new_lse).masked_fill_(lse_i == -math.inf, 0.0)  # −inf − −inf is NaN
        self._out, self._lse = out, lse
        self._out_i, self._share = out_i.to(out.dtype), share.unsqueeze(-1).to(out.dtype)
        self._new_lse = torch.logaddexp(new_lse, lse_i, out=new_lse)

    def apply(self, *, heads_third: bool = False) -> None:
        """In place, without another allocation; `heads_third` of tensors (b, segments, heads, rows, d)."""
        together = (self._out, self._out_i, self._share)
        for out, out_i, share in by_head(*together) if heads_third else [together]:
            out.lerp_(out_i, share)
        self._lse.copy_(self._new_lse)


def by_head(*same_BSHLX: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors (b, segments, heads, rows, x) for an operation in place, head by head where that is faster.

    On CPU torch loops over two dimensions at a time, the closest in memory: of few heads, a few rows.
    """
    b, segments, heads, rows, _ = same_BSHLX[0].shape
    few = heads in (2, 3)  # from four on it is as fast together, and fewer calls
    if not few or same_BSHLX[0].device.type != "cpu" or b * segments * rows < 1024:
        return [same_BSHLX]
    return list(zip(*(x.unbind(2) for x in same_BSHLX), strict=True))
