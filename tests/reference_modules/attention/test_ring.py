"""Two, three and four ranks give the numbers of one device, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_modules.attention import (
    DilatedAttention,
    DistributedDilatedAttention,
    RingDilatedAttention,
    shard,
    unshard,
)
from reference_modules.attention.ring_pass import Ring
from reference_modules.pool import TensorPool
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting
from tests.reference_modules.attention.ranks import all_returned, run

# a segment inside a chunk, over several chunks, over all; beside chunk ends; dilations that divide nothing
BRANCHES = [
    ((8, 24, 96), (1, 2, 4)),
    ((96,), (1,)),
    ((96, 24), (12, 4)),
    ((7, 29, 50), (1, 3, 7)),
    ((200, 5), (9, 2)),
    ((4, 6), (2, 3)),
]
FORMS = {"ring": RingDilatedAttention, "distributed": DistributedDilatedAttention}
TOKENS = 96  # splits into 2 · ranks parts for 2, 3 and 4 ranks


def cases() -> list[dict[str, Any]]:
    """All combinations for the first branches; the others with each form once, turn and turn about."""
    found = [
        {
            "segments": w,
            "dilations": r,
            "form": form,
            "placement": placement,
            "is_causal": causal,
            "rule": "paper",
        }
        for i, (w, r) in enumerate(BRANCHES)
        for j, form in enumerate(FORMS)
        for k, placement in enumerate(("contiguous", "zigzag"))
        for causal in (False, True)
        if i == 0 or (k == (i + j) % 2 and causal == bool((i // 2 + k) % 2))
    ]
    return [*found, {**found[1], "rule": "torchscale"}, {**found[-1], "rule": "torchscale"}]


def one_case(
    rank: int, ranks: int, case: dict[str, Any], dtype: torch.dtype, pool: TensorPool
) -> list[torch.Tensor]:
    *inputs, dout = numbers((2, TOKENS, 3, 4), 7, dtype=dtype)
    module = FORMS[case["form"]](
        case["segments"],
        case["dilations"],
        placement=case["placement"],
        offset_rule=case["rule"],
        enable_memory_pool=True,
        pool=pool,
    )
    local = [shard(x.detach(), rank, ranks, case["placement"]).requires_grad_() for x in inputs]
    out = module(*local, is_causal=case["is_causal"])
    grads = torch.autograd.grad(out, local, shard(dout, rank, ranks, case["placement"]))
    return [out.detach(), *grads]


def every_case(rank: int, ranks: int, dtype: torch.dtype) -> tuple[list[list[Any]], int]:
    pool = TensorPool("cpu", threshold_mb=0)
    found = [[x.numpy() for x in one_case(rank, ranks, case, dtype, pool)] for case in cases()]
    return found, pool.stats().leases


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_numbers_of_one_device(ranks: int) -> None:
    returned = all_returned(run(ranks, every_case, torch.float64))
    assert [leases for _, leases in returned] == [0] * ranks
    q, k, v, dout = numbers((2, TOKENS, 3, 4), 7)
    for i, case in enumerate(cases()):
        parts = [[torch.from_numpy(x) for x in found[i]] for found, _ in returned]
        whole = [unshard([part[j] for part in parts], case["placement"]) for j in range(4)]
        setting = Setting(case["segments"], case["dilations"], case["is_causal"], case["rule"])
        expected, _ = oracle.joint(setting, q, k, v)
        wanted = [expected, *oracle.gradients(expected, (q, k, v), dout)]
        assert oracle.largest_difference(whole, wanted) <= 1e-10, case
        alone = DilatedAttention(case["segments"], case["dilations"], offset_rule=case["rule"])
        out = alone(q, k, v, case["is_causal"])
        assert oracle.largest_difference(whole, [out, *oracle.gradients(out, (q, k, v), dout)]) <= 1e-12, case


def half_precision(rank: int, ranks: int) -> list[Any]:
    pool = TensorPool("cpu", threshold_mb=0)
    case = {**cases()[0], "is_causal": True}
    forms = [{**case, "form": form} for form in FORMS]
    return [[x.float().numpy() for x in one_case(rank, ranks, form, torch.bfloat16, pool)] for form in forms]


def test_half_precision_accumulates_in_float32_across_ranks() -> None:
    returned = all_returned(run(2, half_precision))
    q, k, v, dout = numbers((2, TOKENS, 3, 4), 7, dtype=torch.bfloat16)
    out = DilatedAttention(*BRANCHES[0])(q, k, v, True)
    wanted = [out, *oracle.gradients(out, (q, k, v), dout)]
    for form in range(2):
        parts = [[torch.from_numpy(x) for x in found[form]] for found in returned]
        whole = [unshard([part[j] for part in parts]) for j in range(4)]
        for a, b in zip(whole, wanted, strict=True):  # one rounding to bfloat16, and which way it fell
            torch.testing.assert_close(a, b.detach().float(), atol=1e-3, rtol=2**-7)


def test_without_a_group_it_is_dilated_attention() -> None:
    q, k, v, _ = numbers((1, 20, 3, 4), 0)
    expected = DilatedAttention([8, 16], [1, 2])(q, k, v, True)
    for form in FORMS.values():
        assert torch.equal(form([8, 16], [1, 2], placement="zigzag")(q, k, v, True), expected)


def test_the_ring_stops_where_no_rank_sees_more() -> None:
    from reference_modules.attention.exchange import Peers
    from reference_modules.attention.joint import Plan
    from reference_modules.attention.pairwise import DilatedWork

    def steps(pairs: list[tuple[int, int]], placement: str = "contiguous", causal: bool = False) -> int:
        ring = Ring(Peers(None, 0, 4), placement, 16)
        return ring.steps(DilatedWork(Plan.of(pairs, 2, "paper", causal, 1.0)), torch.zeros(1, 16, 2, 4))

    assert steps([(16, 1), (8, 2)]) == 1
    assert steps([(32, 1)]) == 4  # to the right neighbour is three steps around
    assert steps([(32, 1)], causal=True) == 2
    assert steps([(64, 4)]) == 4
    assert steps([]) == 1


@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_unshard_undoes_shard(placement: str) -> None:
    x = torch.arange(48).view(2, 24)
    assert torch.equal(unshard([shard(x, i, 3, placement) for i in range(3)], placement), x)
    with pytest.raises(ValueError, match="24 tokens do not split into"):
        shard(x, 0, 5, placement)
