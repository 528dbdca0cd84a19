"""Peers of dilated attention: torchscale's way on PyTorch's kernels, and one flex_attention call.

Both are written here from how they work: torchscale's with its own offset rule, flex with ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad

Branches = list[tuple[int, int]]


def torchscale_way(q: Tensor, k: Tensor, v: Tensor, branches: Branches, causal: bool) -> Tensor:
    """Step for step what torchscale's module does between its projections, with PyTorch's kernel inside.

    A branch: cut into segments, keep every r-th row of a head group, attend, spread out and lse over zeros in
    full size; then mix all branches densely by the softmax of their lse, which carries no gradient there.
    Nothing is padded or copied that torchscale does not pad or copy at these shapes.
    """
    b, n, h, d = q.shape
    outs, lses = [], []
    for w, r in branches:
        w = min(w, n)
        rows = (_kept_rows(x, w, r) for x in (q, k, v))
        out, lse = _spread(*_attend(*rows, heads=h, causal=causal), r)
        outs.append(_joined(out, b)[:, :n])
        lses.append(_joined(lse, b)[:, :n])
    with torch.no_grad():
        largest = torch.stack(lses).amax(0)
        weights = [(lse - largest).exp() for lse in lses]
        total = torch.stack(weights).sum(0)
        weights = [weight / total for weight in weights]
    mixed = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        mixed += out * weight
    return mixed.view(b, h, n, d).transpose(1, 2).contiguous()


def _kept_rows(x: Tensor, w: int, r: int) -> Tensor:
    """(segments · heads, w / r, d): head group g of r keeps the rows g modulo r."""
    x = _padded(x, 1, w)
    x = x.reshape(-1, w, *x.shape[2:])
    heads = x.shape[2]
    x = _padded(_padded(x, 1, r), 2, r)
    segments, rows, padded_heads, d = x.shape
    x = x.view(segments, rows // r, r, r, padded_heads // r, d)  # rows (l r1), heads (r2 h)
    x = x.diagonal(dim1=2, dim2=3).movedim(-1, 2).reshape(segments, rows // r, padded_heads, d)
    return x[:, :, :heads].transpose(1, 2).reshape(segments * heads, rows // r, d)


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """With zeros up to a multiple; the tensor itself where it is one already (`pad` by nothing copies)."""
    missing = -x.shape[dim] % multiple
    return pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    """out (segments, rows, heads, d) and lse (segments, heads, rows) of the fused kernel."""
    q, k, v = (x.view(-1, heads, *x.shape[1:]) for x in (q, k, v))
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return found[0].transpose(1, 2), found[1]


def _spread(out: Tensor, lse: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """(segments, heads, rows · r, d) and (..., 1): 0 and lse −1e8 where a head has no row."""
    segments, rows, heads, d = out.shape
    if missing := -heads % r:
        out, lse = pad(out, (0, 0, 0, missing)), pad(lse, (0, 0, 0, missing), value=-1e8)
    group = (heads + missing) // r
    out = out.reshape(segments, rows, r, group, d).permute(0, 1, 3, 4, 2)
    out = torch.diag_embed(out, dim1=4, dim2=5).permute(0, 5, 2, 1, 4, 3)
    lse = torch.diag_embed(lse.reshape(segments, r, group, rows).permute(0, 3, 2, 1), dim1=3, dim2=4)
    lse = lse.masked_fill_(lse == 0, -1e8).permute(0, 4, 2, 1, 3)
    full = (segments, heads + missing, rows * r)
    return out.reshape(*full, d)[:, :heads], lse.reshape(*full, 1)[:, :heads]


def _joined(x: Tensor, b: int) -> Tensor:
    """(b · heads, n, x) of (b · segments, heads, w, x)."""
    x = x.reshape(b, -1, *x.shape[1:]).transpose(1, 2)
    return x.reshape(b * x.shape[1], -1, x.shape[-1])


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
