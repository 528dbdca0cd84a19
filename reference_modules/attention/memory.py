"""How much memory a step takes, as a formula: what docs/attention.md states and a benchmark holds it to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_modules.attention.joint import SLAB_BYTES

# Alive at once: k and v packed, dout corrected for lse's rounding, three gradients and the kernel's buffers;
# the rest was measured: what the C allocator keeps of slabs that were freed.
TENSORS_OF_A_SLAB = 8


def saved_bytes(b: int, n: int, h: int, d: int, dtype: torch.dtype) -> int:
    """Between forward and backward: q, k, v, out, and an lse of 8 bytes a row (4 in half precision)."""
    lse = 4 if dtype in (torch.float16, torch.bfloat16) else 8
    return 4 * b * n * h * d * dtype.itemsize + lse * b * n * h


def step_bytes(
    b: int,
    n: int,
    h: int,
    d: int,
    dtype: torch.dtype,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
) -> int:
    """Peak of forward and backward in float32 or float64 on CPU, with the gradients that come in and go out.

    Eight tensors like q (q, k, v, out, dout, dq, dk, dv), the saved lse, and TENSORS_OF_A_SLAB slabs.
    """
    like_q = b * n * h * d * dtype.itemsize
    slab = max(
        min(max(SLAB_BYTES["cpu"], b * w // r * h * d * dtype.itemsize), like_q // r)
        for w, r in zip(segment_lengths, dilation_rates, strict=True)
    )
    return 8 * like_q + 8 * b * n * h + TENSORS_OF_A_SLAB * slab
