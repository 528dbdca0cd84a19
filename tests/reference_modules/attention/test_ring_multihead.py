"""Multi-head attention over ranks: one device's outputs, and its gradients once they are summed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from reference_modules.attention import (
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
    reduce_gradients,
    shard,
    unshard,
)
from reference_modules.pool import TensorPool
from tests.reference_modules.attention.ranks import GROUP_TIMEOUT, all_returned, run

TOKENS, EMBED, HEADS = 48, 32, 4
BRANCHES = ((8, 12, 48), (1, 2, 4))
CASES = [
    {"placement": "contiguous", "gather": False, "num_kv_heads": None},
    {"placement": "zigzag", "gather": True, "num_kv_heads": 2},
]


def whole() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, dout = (torch.randn(2, TOKENS, EMBED, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, dout


def one_device(num_kv_heads: int | None) -> MultiheadDilatedAttention:
    torch.manual_seed(0)
    options: Any = {"num_kv_heads": num_kv_heads, "dtype": torch.float64}
    return MultiheadDilatedAttention(EMBED, HEADS, *BRANCHES, **options)


def on_a_rank(rank: int, ranks: int) -> list[dict[str, Any]]:
    found = []
    for case in CASES:
        pool = TensorPool("cpu", threshold_mb=0)
        module = RingMultiheadDilatedAttention(EMBED, HEADS, *BRANCHES, dtype=torch.float64, **case)
        module.load_state_dict(one_device(case["num_kv_heads"]).state_dict())
        x, dout = (shard(y, rank, ranks, case["placement"]) for y in whole())
        x.requires_grad_()
        out, weights = module(x, x, x, is_causal=True)
        assert weights is None
        out.backward(dout)
        sent = [reduce_gradients(module, bucket_mb=0.004, pool=pool)]
        found.append(
            {
                "out": out.detach().numpy(),
                "dx": x.grad.numpy(),
                "parameters": [p.grad.numpy() for p in module.parameters()],
                "buckets": sent,
                "leases": pool.stats().leases,
            }
        )
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_numbers_of_one_device(ranks: int) -> None:
    returned = all_returned(run(ranks, on_a_rank))
    for i, case in enumerate(CASES):
        module = one_device(case["num_kv_heads"])
        x, dout = whole()
        x.requires_grad_()
        out, _ = module(x, x, x, is_causal=True)
        out.backward(dout)
        for name, expected in (("out", out.detach()), ("dx", x.grad)):
            parts = [torch.from_numpy(found[i][name]) for found in returned]
            torch.testing.assert_close(unshard(parts, case["placement"]), expected, atol=1e-12, rtol=1e-12)
        for found in returned:
            assert found[i]["leases"] == 0
            assert found[i]["buckets"] == [4]  # 4 kB each: the two weights beyond it alone, biases together
            for ours, theirs in zip(found[i]["parameters"], module.parameters(), strict=True):
                torch.testing.assert_close(torch.from_numpy(ours), theirs.grad, atol=1e-12, rtol=1e-12)


def test_without_a_group_it_is_the_multihead_module_and_nothing_is_reduced() -> None:
    ring = RingMultiheadDilatedAttention(EMBED, HEADS, *BRANCHES, placement="zigzag", dtype=torch.float64)
    alone = one_device(None)
    ring.load_state_dict(alone.state_dict())
    x, _ = whole()
    mask = torch.arange(TOKENS).expand(2, TOKENS) >= 40
    found, expected = (m(x, x, x, is_causal=True, key_padding_mask=mask)[0] for m in (ring, alone))
    assert torch.equal(found, expected)
    assert reduce_gradients(ring) == 0


def reduced(rank: int, ranks: int) -> dict[str, Any]:
    """A parameter unused on one rank, one unused on all, one of half precision, one frozen; and a mean."""
    first, unused, half, frozen = (nn.Parameter(torch.zeros(3)) for _ in range(4))
    half.data = half.data.bfloat16()
    frozen.requires_grad_(False)
    first.grad = torch.full((3,), float(rank + 1))
    half.grad = torch.full((3,), 1.0, dtype=torch.bfloat16) if rank == 1 else None
    parameters = [first, unused, half, frozen]
    buckets = reduce_gradients(parameters)
    after = [None if p.grad is None else p.grad.tolist() for p in parameters]
    reduce_gradients([first], average=True)
    return {"buckets": buckets, "after": after, "mean": first.grad.tolist(), "half": half.grad.dtype}


def test_unused_frozen_and_half_precision_parameters() -> None:
    for found in all_returned(run(2, reduced)):
        assert found["buckets"] == 2  # one a type
        assert found["after"] == [[3.0] * 3, None, [1.0] * 3, None]
        assert found["mean"] == [3.0] * 3
        assert found["half"] is torch.bfloat16


def unlike(rank: int, ranks: int) -> list[str]:
    said = []

    def attempt(parameters: list[nn.Parameter]) -> None:
        try:
            reduce_gradients(parameters)
            said.append("")
        except ValueError as error:
            said.append(str(error))

    attempt([nn.Parameter(torch.zeros(3 + rank))])
    attempt([nn.Parameter(torch.zeros(3)) for _ in range(1 + rank)])
    embedding = nn.Embedding(5, 3, sparse=rank == 1)
    embedding(torch.tensor([1])).sum().backward()
    attempt(list(embedding.parameters()))
    module = RingMultiheadDilatedAttention(8, 2, [8], [1])
    try:
        x = torch.zeros(1, 8, 8 + rank)
        module(x, x, x)
    except ValueError as error:
        said.append(str(error))
    attempt([nn.Parameter(torch.zeros(3))])  # and the group is still in step afterwards
    return said


def test_ranks_that_differ_all_raise_at_once() -> None:
    first, second = all_returned(run(2, unlike))
    assert "rank 1 has 1 parameters and rank 0 1, or of other shapes" in first[0]
    assert "rank 1 has 2 parameters and rank 0 1" in first[1]
    assert first[2] == "rank 1 has a sparse gradient; only dense ones are summed: use sparse=False"
    assert "of shape (5, 3) here" in second[2]
    assert "rank 1 refused its input" in first[3]
    assert "query has shape (1, 8, 9); it must be (batch, tokens, 8)" in second[3]
    assert first[4] == second[4] == ""


def die(rank: int, ranks: int) -> dict[str, Any]:
    pool = TensorPool("cpu", threshold_mb=0)
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    reduce_gradients(parameters, pool=pool, bucket_mb=0.0005)
    if rank == 1:
        os._exit(1)
    begun, error = time.monotonic(), ""
    try:
        reduce_gradients(parameters, pool=pool, bucket_mb=0.0005, timeout=timedelta(seconds=2))
    except RuntimeError as raised:
        error = type(raised).__name__
    return {"error": error, "seconds": time.monotonic() - begun, "leases": pool.stats().leases}


def test_a_dead_rank_is_an_error_on_the_others_and_no_lease_stays() -> None:
    for found in all_returned(run(3, die, answers=2)):
        assert (found["error"], found["leases"]) == ("ExchangeError", 0)
        assert found["seconds"] < GROUP_TIMEOUT.total_seconds()


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_mb is 0; it must be above 0"):
        reduce_gradients([nn.Parameter(torch.zeros(1))], bucket_mb=0)
