"""The peer that the benchmark races us against computes what we do, where no tail is padded."""

from __future__ import annotations

import pytest
import torch

from benchmarks.attention_peers import torchscale_way
from reference_modules.attention import dilated_attention
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("branches", [[(16, 1), (32, 2), (64, 4)], [(64, 4), (32, 2)], [(128, 2)]])
def test_torchscales_way_is_ours_with_its_offsets_and_its_gradient(
    branches: list[tuple[int, int]], causal: bool
) -> None:
    q, k, v, dout = numbers((2, 64, 4, 8), 0)
    theirs = torchscale_way(q, k, v, branches, causal)
    ours = dilated_attention(
        q,
        k,
        v,
        segment_lengths=[w for w, _ in branches],
        dilation_rates=[r for _, r in branches],
        is_causal=causal,
        offset_rule="torchscale",
        detach_mixing=True,
    )
    assert isinstance(ours, torch.Tensor)
    found = [theirs, *oracle.gradients(theirs, (q, k, v), dout)]
    assert oracle.largest_difference(found, [ours, *oracle.gradients(ours, (q, k, v), dout)]) <= 1e-12
