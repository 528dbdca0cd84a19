"""Dense float64 attention straight from the definition; it shares no line with the code under test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """The arguments that choose which pairs are allowed."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    offset_rule: str = "paper"

    def arguments(self) -> dict[str, object]:
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "is_causal": self.is_causal,
            "offset_rule": self.offset_rule,
        }


def allowed_by_branch(setting: Setting, n: int, h: int, ignored_BN: Tensor | None = None) -> list[Tensor]:
    """For each branch (b or 1, h, n, n): whether it lets query t see key s."""
    t = torch.arange(n).unsqueeze(1)
    s = torch.arange(n).unsqueeze(0)
    found = []
    for w, r in zip(setting.segment_lengths, setting.dilation_rates, strict=True):
        per_head = []
        for j in range(h):
            o = j % r if setting.offset_rule == "paper" else j // math.ceil(h / r)
            allowed = (t // w == s // w) & ((t % w) % r == o) & ((s % w) % r == o)
            per_head.append(allowed & (s <= t) if setting.is_causal else allowed)
        branch = torch.stack(per_head).unsqueeze(0)
        found.append(branch if ignored_BN is None else branch & ~ignored_BN[:, None, None, :])
    return found


def attention(
    q: Tensor, k: Tensor, v: Tensor, log_weight_BHTS: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax of scores plus log weights, in the inputs' own type; rows without keys give 0 and −inf."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores + log_weight_BHTS
    largest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(
        scores - largest.masked_fill(largest == -math.inf, 0.0)
    )  # the quotient does not depend on it
    total = weights.sum(-1, keepdim=True)
    p = weights / total.masked_fill(total == 0.0, 1.0)
    return torch.einsum("bhts,bshd->bthd", p, v), torch.logsumexp(scores.detach(), -1).transpose(1, 2)


def joint(
    setting: Setting,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    ignored_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (b, n, h, d) and lse (b, n, h): a pair that m branches allow has weight m."""
    multiplicity = sum(allowed.double() for allowed in allowed_by_branch(setting, *q.shape[1:3], ignored_BN))
    assert isinstance(multiplicity, Tensor)
    return attention(q, k, v, multiplicity.log(), scale)


def detached_mixing(setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The branches' outputs mixed by constant weights exp(lse_i − lse)."""
    parts = [
        attention(q, k, v, allowed.double().log()) for allowed in allowed_by_branch(setting, *q.shape[1:3])
    ]
    lse = torch.stack([part[1] for part in parts])
    share = torch.softmax(lse, 0).nan_to_num(0.0).detach()
    return sum(weight.unsqueeze(-1) * out for weight, (out, _) in zip(share, parts, strict=True))


def gradients(out: Tensor, inputs: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout)


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest absolute difference in float64; infinities must sit at the same places."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert not a.isnan().any()
        assert not b.isnan().any()
        assert torch.equal(a.isinf(), b.isinf())
        difference = (a.detach().double() - b.detach().double())[~b.isinf()].abs()
        worst = max([worst, *([float(difference.max())] if difference.numel() else [])])
    return worst
