"""Which float32 problems are computed in float64, and which lse may be rounded to float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference_modules.attention.joint import Plan

LARGE_LSE = 32.0
FEW_PAIRS = 1 << 17  # in float64 they take a millisecond
ROUNDED_LSE = 16.0  # its last bit in float32 is then 5e-7 of a probability, and it is off by half of that


def needs_float64(q_BNHD: Tensor, lse_BNH: Tensor, plan: Plan) -> bool:
    """Whether scores are so large that the last bit of one in float32 is much of its probability.

    At 1e4 it is 1e-3, and which way it falls is luck.  The scores that count in a row lie near its lse.
    Within a pass all tiles go by one answer: else rounding that cancels within a type would stay.
    """
    if q_BNHD.dtype != torch.float32 or q_BNHD.device.type != "cpu" or plan.dropout:
        return False
    return largest_lse(lse_BNH) > large_lse(q_BNHD, plan)


def large_lse(q_BNHD: Tensor, plan: Plan) -> float:
    """From what size on a row's lse asks for float64; by shapes alone, never by what other rows hold.

    Where a row has one key that counts, dO·v − dO·out should cancel and leaves 1e-7 times q, in dk.  Among
    many rows that drowns in the error of all; where there are few it shows, and float64 costs little: there
    it is taken for every lse that scores within 1 cannot give.
    """
    b, n, h, _ = q_BNHD.shape
    keys = sum(-(-min(branch.segment, n) // branch.dilation) for branch in plan.branches)
    return LARGE_LSE if b * n * h * keys > FEW_PAIRS else math.log(max(keys, 1)) + 1.0


def largest_lse(lse_BNH: Tensor) -> float:
    """The size of the largest lse of a row with keys; 0 where there is none."""
    if not lse_BNH.numel():
        return 0.0
    least, most = (float(x) for x in lse_BNH.aminmax())
    if least == -math.inf:  # rows without keys
        least = float(lse_BNH.masked_fill(lse_BNH == -math.inf, 0.0).amin())
    return max(most, -least)


def for_kernels(q_BNHD: Tensor, lse_BNH: Tensor) -> Tensor:
    """In float32 where its rounding is below what kernels lose anyway; else each tile undoes the rounding."""
    if q_BNHD.dtype == torch.float32 and largest_lse(lse_BNH) <= ROUNDED_LSE:
        return lse_BNH.float()
    return lse_BNH
