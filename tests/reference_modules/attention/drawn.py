"""What hypothesis draws: ragged tails, segments beyond the sequence, more branches than heads."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.reference_modules.attention.oracle import Setting


@st.composite
def settings_of_branches(draw: st.DrawFn) -> Setting:
    count = draw(st.integers(1, 4))
    segments = tuple(draw(st.integers(1, 40)) for _ in range(count))
    dilations = tuple(draw(st.integers(1, min(w, 9))) for w in segments)
    return Setting(segments, dilations, draw(st.booleans()), draw(st.sampled_from(["paper", "torchscale"])))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 48)),
        draw(st.integers(1, 7)),
        draw(st.sampled_from([1, 3, 8])),
    )


def numbers(
    shape: tuple[int, ...], seed: int, count: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v that ask for gradients, and an outgoing gradient."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    return [x.requires_grad_() if i < 3 else x for i, x in enumerate(found)]
