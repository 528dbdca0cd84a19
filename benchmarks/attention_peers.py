"""Peers of dilated attention: torchscale's way on PyTorch's kernels, and one flex_attention call.

Both are written here from how they work, for the offset rule that their users run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad

Branches = list[tuple[int, int]]


def torchscale_way(q: Tensor, k: Tensor, v: Tensor, branches: Branches, causal: bool) -> Tensor:
    """A branch: cut, gather every r-th row of a head group, attend, scatter into zeros; then mix densely.

    Mixing weights carry no gradient, as there.
    """
    outs, lses = [], []
    for w, r in branches:
        out, lse = _branch(*(_gathered(x, min(w, x.shape[1]), r) for x in (q, k, v)), causal)
        outs.append(_scattered(out, q.shape, min(w, q.shape[1]), r, 0.0))
        lses.append(_scattered(lse.unsqueeze(-1), (*q.shape[:3], 1), min(w, q.shape[1]), r, -1e8))
    with torch.no_grad():
        stacked = torch.stack(lses)
        weights = (stacked - stacked.amax(0)).exp()
        weights = weights / weights.sum(0)
    total = torch.zeros_like(q)
    for out, weight in zip(outs, weights, strict=True):
        total = total + out * weight.to(out.dtype)
    return total


def _gathered(x: Tensor, w: int, r: int) -> Tensor:
    """(segments, heads, w / r, d): head group g of r takes the rows g modulo r."""
    b, n, h, d = x.shape
    x = pad(x, (0, 0, 0, -h % r, 0, -n % w))
    x = x.view(b * (x.shape[1] // w), w // r, r, r, x.shape[2] // r, d)  # rows (l r1), heads (r2 h)
    x = x.diagonal(dim1=2, dim2=3)  # (segments, l, h, d, r)
    return x.permute(0, 4, 2, 1, 3).flatten(1, 2)[:, : h if r == 1 else None]


def _scattered(x: Tensor, shape: torch.Size | tuple[int, ...], w: int, r: int, empty: float) -> Tensor:
    """Back to (b, n, h, d), `empty` where the head has no row."""
    b, n, h, d = shape
    segments, heads, rows, _ = x.shape
    full = x.new_full((segments, rows, r, r, heads // r, d), empty)
    full.diagonal(dim1=2, dim2=3).copy_(x.view(segments, r, heads // r, rows, d).permute(0, 3, 2, 4, 1))
    return full.view(b, -1, heads, d)[:, :n, :h]


def _branch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return found[0], found[1]


def flex_joint(q: Tensor, k: Tensor, v: Tensor, branches: Branches, causal: bool) -> Callable[[], Tensor]:
    """One compiled flex_attention with the joint mask; the log of each pair's count is added to its score."""
    heads, n = q.shape[2], q.shape[1]

    def count(h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.int32, device=q.device)
        for w, r in branches:
            same = (t // w == s // w) & ((t % w) % r == h % r) & ((s % w) % r == h % r)
            total = total + (same & (s <= t) if causal else same)
        return total

    mask = create_block_mask(
        lambda b, h, t, s: count(h, t, s) > 0, None, heads, n, n, device=str(q.device), _compile=True
    )

    def score(value: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return value + count(h, t, s).float().log()

    compiled = torch.compile(flex_attention)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return lambda: compiled(*heads_first, score_mod=score, block_mask=mask).transpose(1, 2)
