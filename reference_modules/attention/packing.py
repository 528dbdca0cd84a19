"""The rows of a tile's head runs as one tensor that a kernel reads fast."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from reference_modules.attention.workspace import Pool, temporary


def pack(
    views_BSHLX: list[Tensor],
    side_by_side: bool,
    dtype: torch.dtype,
    pool: Pool | None,
    held: ExitStack,
    factors: list[Tensor] | None = None,
) -> Tensor:
    """(b·segments, heads, rows, x): the one view itself where that will do, else a gathered copy.

    With `factors`, (b, segments, heads, rows, 1) for each view, always a copy: the products.

    `side_by_side` asks for rows without gaps: over long stretches of rows that lie apart kernels take up to
    15 % longer.
    """
    first = views_BSHLX[0]
    apart = side_by_side and first.stride(-2) != first.shape[-1]
    as_good = len(views_BSHLX) == 1 and first.dtype == dtype and not apart and _is_one_batch(first)
    if as_good:
        return first.flatten(0, 1) if factors is None else (first * factors[0]).flatten(0, 1)
    b, segments, _, rows, x = first.shape
    heads = sum(view.shape[2] for view in views_BSHLX)
    buffer = held.enter_context(temporary(pool, (b, segments, heads, rows, x), dtype, first.device))
    at = 0
    for index, view in enumerate(views_BSHLX):
        target = buffer[:, :, at : at + view.shape[2]]
        if factors is None:
            target.copy_(view)
        else:
            torch.mul(view, factors[index], out=target)
        at += view.shape[2]
    return buffer.flatten(0, 1)


def _is_one_batch(view_BSHLX: Tensor) -> bool:
    b, segments = view_BSHLX.shape[:2]
    merges = b == 1 or segments == 1 or view_BSHLX.stride(0) == segments * view_BSHLX.stride(1)
    return merges and view_BSHLX.stride(-1) == 1
