"""`dilated_attention`: the joint softmax over all branches, with its exact gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from reference_modules.attention import checks
from reference_modules.attention.autograd import JointAttention
from reference_modules.attention.compiled import attend_in_graph
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.joint import Plan
from reference_modules.attention.workspace import Pool


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    scale: float | None = None,
    offset_rule: OffsetRule = "paper",
    detach_mixing: bool = False,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    return_lse: bool = False,
    pool: Pool | None = None,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax over s of (scale·q_t·k_s + log m(t, s)) times v_s; m(t, s) branches let query t see key s.

    Branch (w, r) lets t see s iff t//w = s//w, (t mod w) mod r = (s mod w) mod r = o_j, and s ≤ t if
    causal; head j has the offset o_j = j mod r ("paper") or j // ceil(heads / r) ("torchscale").  q, k, v
    are (b, n, h, d) for any n; a row without keys gives 0 and lse −inf.  `key_padding_mask` is (b, n), True
    = ignore that key.  Dropout falls on each branch's probabilities.  `detach_mixing=True` holds the
    branches' mixing weights constant in the backward. Temporaries come from `pool`.  lse is (b, n, h) and
    carries no gradient.  kernel="plain" is the check on the fused.
    """
    checks.check_branches(segment_lengths, dilation_rates)
    checks.check_options(scale, offset_rule, dropout_p, kernel)
    checks.check_switch("is_causal", is_causal)
    checks.check_pool(pool)
    checks.check_qkv(q, k, v)
    checks.check_key_padding_mask(key_padding_mask, q)
    plan = Plan.of(
        list(zip(segment_lengths, dilation_rates, strict=True)),
        heads=q.shape[2],
        rule=offset_rule,
        causal=is_causal,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        dropout=float(dropout_p),
        detach_mixing=detach_mixing,
        kernel=kernel,
    )
    seed = torch.randint(1 << 62, ()) if dropout_p > 0.0 else None
    if torch.compiler.is_compiling() and pool is None:
        out, lse = attend_in_graph(q, k, v, key_padding_mask, seed, plan)
    else:
        joint = JointAttention.apply(q, k, v, key_padding_mask, seed, plan, pool)  # type: ignore[no-untyped-call]
        out, lse = cast(tuple[Tensor, Tensor], joint)
    return (out, lse) if return_lse else out
