"""The same attention as one flex_attention call: a second way, from the definition, to check the first by.

It walks over every block that any pair of the joint mask touches, at full density, so it is no faster.
Compiled it needs a GPU or a C++ compiler; uncompiled it forms all n × n scores.  On CPU flex_attention has
no backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from reference_modules.attention import checks
from reference_modules.attention.geometry import OffsetRule


def flex_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    scale: float | None = None,
    offset_rule: OffsetRule = "paper",
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `dilated_attention(..., return_lse=True)` gives them."""
    checks.check_branches(segment_lengths, dilation_rates)
    checks.check_options(scale, offset_rule, 0.0, "auto")
    checks.check_qkv(q, k, v)
    n, heads = q.shape[1], q.shape[2]
    count = multiplicity(
        list(zip(segment_lengths, dilation_rates, strict=True)), heads, offset_rule, is_causal
    )

    def with_log_count(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return score + count(h, t, s).to(score.dtype).log()

    mask = create_block_mask(
        lambda b, h, t, s: count(h, t, s) > 0, None, heads, n, n, device=str(q.device), _compile=compiled
    )
    run: Any = torch.compile(flex_attention) if compiled else flex_attention
    q_BHND, k_BHND, v_BHND = (x.transpose(1, 2) for x in (q, k, v))
    found = run(q_BHND, k_BHND, v_BHND, with_log_count, mask, scale=scale, return_lse=True)
    out_BHND, lse_BHN = cast(tuple[Tensor, Tensor], found)
    return out_BHND.transpose(1, 2), lse_BHN.transpose(1, 2)


def multiplicity(
    branches: list[tuple[int, int]], heads: int, rule: OffsetRule, is_causal: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(head, query, key) → how many branches allow the pair."""

    def count(h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        total = torch.zeros_like(t)
        for w, r in branches:
            offset = h % r if rule == "paper" else h // -(-heads // r)
            allowed = (t // w == s // w) & (t % w % r == offset) & (s % w % r == offset)
            total = total + (allowed & (s <= t) if is_causal else allowed)
        return total

    return count
