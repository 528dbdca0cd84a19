"""The joint attention as opaque operators, so that torch.compile keeps one graph and the same numbers.

Tiles, kernel choice and row blocks are decided inside the operator, in eager code.  With `detach_mixing`
the backward operator computes the branches' outputs again, because an operator's outputs must be known in
number beforehand.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, library

from reference_modules.attention.autograd import attend, attend_backward
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.joint import Inputs, Plan, lse_dtype
from reference_modules.attention.plain import accumulation_dtype


@library.custom_op("poolaudit::joint_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    rule: str,
    causal: bool,
    scale: float,
    dropout: float,
    detach_mixing: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    pairs = list(zip(segment_lengths, dilation_rates, strict=True))
    plan = Plan.of(pairs, q.shape[2], cast(OffsetRule, rule), causal, scale, dropout, detach_mixing, kernel)
    out, lse, _ = attend(Inputs.of(q, k, v, mask), plan, None, seed)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


@library.custom_op("poolaudit::joint_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    segment_lengths: list[int],
    dilation_rates: list[int],
    rule: str,
    causal: bool,
    scale: float,
    dropout: float,
    detach_mixing: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pairs = list(zip(segment_lengths, dilation_rates, strict=True))
    plan = Plan.of(pairs, q.shape[2], cast(OffsetRule, rule), causal, scale, dropout, detach_mixing, kernel)
    return attend_backward(dout, Inputs.of(q, k, v, mask), out, lse, {}, plan, None, seed)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, seed, *options = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed)
    ctx.options = options


def _gradient(ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _backward(dout, *ctx.saved_tensors, *ctx.options)
    return (*grads, *[None] * (2 + len(ctx.options)))


_forward.register_autograd(_gradient, setup_context=_keep)


def attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """out and lse, as one node of the graph being compiled."""
    segments = [branch.segment for branch in plan.branches]
    dilations = [branch.dilation for branch in plan.branches]
    rule = plan.branches[0].rule
    options = (rule, plan.causal, plan.scale, plan.dropout, plan.detach_mixing, plan.kernel)
    out, lse = _forward(q, k, v, mask, seed, segments, dilations, *options)
    return out, lse.to(accumulation_dtype(q.dtype))
