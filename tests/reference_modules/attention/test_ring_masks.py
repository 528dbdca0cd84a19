"""Key padding masks and dropout over ranks: the mask of one device, the gradient of the draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference_modules.attention import (
    BlockPattern,
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    DistributedDilatedAttention,
    RingDilatedAttention,
    shard,
    unshard,
)
from reference_modules.pool import TensorPool
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting
from tests.reference_modules.attention.ranks import all_returned, run

TOKENS = 48  # splits into 2 · ranks blocks of 4 for 2 and 3 ranks
BRANCHES = ((8, 12, 48), (1, 2, 4))
EVERYTHING = BlockPattern(block_size=4, local=100)
BY_CONTENT = BlockPattern(block_size=4, local=0, content=2)
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ring": (RingDilatedAttention, {}),
    "distributed": (DistributedDilatedAttention, {}),
    "blocks": (BlockSparseRingDilatedAttention, {"pattern": EVERYTHING}),
    "content": (BlockSparseRingDilatedAttention, {"pattern": BY_CONTENT}),
}
CASES = [
    (form, placement, causal)
    for form in FORMS
    for placement in ("contiguous", "zigzag")
    for causal in (False, True)
]


def mask() -> torch.Tensor:
    """Padding at the end of one sequence, holes and a whole block in the other."""
    ignored = torch.zeros(2, TOKENS, dtype=torch.bool)
    ignored[0, 40:] = True
    ignored[1, 3::5] = True
    ignored[1, 8:16] = True
    return ignored


def masked(rank: int, ranks: int) -> tuple[list[Any], int]:
    pool = TensorPool("cpu", threshold_mb=0)
    q, k, v, dout = numbers((2, TOKENS, 3, 4), 7)
    found = []
    for form, placement, causal in CASES:
        kind, extra = FORMS[form]
        module = kind(*BRANCHES, placement=placement, enable_memory_pool=True, pool=pool, **extra)
        local = [shard(x.detach(), rank, ranks, placement).requires_grad_() for x in (q, k, v)]
        out = module(*local, causal, shard(mask(), rank, ranks, placement))
        grads = torch.autograd.grad(out, local, shard(dout, rank, ranks, placement))
        found.append([x.detach().numpy() for x in (out, *grads)])
    return found, pool.stats().leases


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mask_hides_what_it_hides_on_one_device(ranks: int) -> None:
    returned = all_returned(run(ranks, masked))
    assert [leases for _, leases in returned] == [0] * ranks
    q, k, v, dout = numbers((2, TOKENS, 3, 4), 7)
    for i, (form, placement, causal) in enumerate(CASES):
        parts = [[torch.from_numpy(x) for x in found[i]] for found, _ in returned]
        whole = [unshard([part[j] for part in parts], placement) for j in range(4)]
        if form == "content":
            alone = BlockSparseRingDilatedAttention(*BRANCHES, pattern=BY_CONTENT)
            expected = alone(q, k, v, causal, mask())
        else:
            expected, _ = oracle.joint(Setting(*BRANCHES, causal), q, k, v, ignored_BN=mask())
        wanted = [expected, *oracle.gradients(expected, (q, k, v), dout)]
        assert oracle.largest_difference(whole, wanted) <= 1e-10, (form, placement, causal)


@pytest.mark.parametrize("pattern", [EVERYTHING, BY_CONTENT])
@pytest.mark.parametrize("tokens", [48, 45])
def test_what_a_masked_key_holds_changes_nothing_within_blocks(pattern: BlockPattern, tokens: int) -> None:
    q, k, v, _ = (x.detach() for x in numbers((2, tokens, 3, 4), 7))
    module = BlockSparseRingDilatedAttention(*BRANCHES, pattern=pattern)
    ignored = mask()[:, :tokens]
    expected = module(q, k, v, False, ignored)
    for x in (k, v):
        x[ignored] = 1e3
    assert torch.equal(module(q, k, v, False, ignored), expected)
    if pattern is EVERYTHING:
        dense = DilatedAttention(*BRANCHES)(q, k, v, False, ignored)
        assert oracle.largest_difference([expected], [dense]) <= 1e-12


def dropped(rank: int, ranks: int, form: str, placement: str) -> dict[str, Any]:
    """Gradients against differences of the same draw, all ranks' inputs moved together; two draws; eval."""
    kind, extra = FORMS[form]
    pool = TensorPool("cpu", threshold_mb=0)
    module = kind(*BRANCHES, placement=placement, dropout=0.3, enable_memory_pool=True, pool=pool, **extra)
    q, k, v, dout = (shard(x.detach(), rank, ranks, placement) for x in numbers((2, TOKENS, 3, 4), 7))
    move = [shard(x.detach(), rank, ranks, placement) for x in numbers((2, TOKENS, 3, 4), 8, 3)]

    def draw(step: float, seed: int = 3) -> torch.Tensor:
        torch.manual_seed(seed)  # the same on all ranks: they must draw apart even so
        moved = [x + step * y for x, y in zip((q, k, v), move, strict=True)]
        return module(*moved, True)

    local = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(3)
    grads = torch.autograd.grad(module(*local, True), local, dout)
    along = sum(float((a * b).sum()) for a, b in zip(grads, move, strict=True))
    difference = float(((draw(1e-5) - draw(-1e-5)) * dout).sum()) / 2e-5
    return {
        "along": along,
        "difference": difference,
        "again": float((draw(0.0) - draw(0.0)).abs().max()),
        "apart": float((draw(0.0) - draw(0.0, 4)).abs().max()),
        "out": draw(0.0).numpy(),
        "eval": module.eval()(q, k, v, True).numpy(),
        "leases": pool.stats().leases,
    }


@pytest.mark.parametrize(
    ("form", "placement"), [("ring", "zigzag"), ("distributed", "contiguous"), ("blocks", "zigzag")]
)
def test_dropout_has_the_gradient_of_its_draw(form: str, placement: str) -> None:
    found = all_returned(run(2, dropped, form, placement))
    along, difference = (sum(x[name] for x in found) for name in ("along", "difference"))
    assert abs(along - difference) <= 1e-6 * max(1.0, abs(along))
    assert abs(along) > 1e-3
    for x in found:
        assert (x["again"], x["leases"]) == (0.0, 0)
        assert x["apart"] > 1e-3
    q, k, v, _ = numbers((2, TOKENS, 3, 4), 7)
    expected = DilatedAttention(*BRANCHES)(q, k, v, True)
    whole = unshard([torch.from_numpy(x["eval"]) for x in found], placement)
    assert oracle.largest_difference([whole], [expected]) <= 1e-12


def probabilities(rank: int, ranks: int, form: str) -> Any:
    """With unit vectors for values the output is the probabilities, dropped and not."""
    kind, extra = FORMS[form]
    n = 16
    q, k, _ = numbers((1, n, 2, n), 0, 3)
    unit = torch.eye(n, dtype=torch.float64).view(1, n, 1, n).expand(1, n, 2, n)
    local = [shard(x.detach(), rank, ranks) for x in (q, k, unit)]
    torch.manual_seed(0)
    module = kind([16], [1], dropout=0.25, **extra)
    return [module(*local).numpy(), module.eval()(*local).numpy()]


@pytest.mark.parametrize("form", ["ring", "distributed", "blocks"])
def test_every_probability_is_dropped_or_scaled_up_and_ranks_draw_apart(form: str) -> None:
    dropped_, kept = (torch.cat(x, 1) for x in zip(*([torch.from_numpy(y) for y in z]
                      for z in all_returned(run(2, probabilities, form))), strict=True))  # fmt: skip
    ratio = dropped_ / kept
    assert torch.all((ratio == 0) | ((ratio - 1 / 0.75).abs() < 1e-12))
    assert 0.15 < float((ratio == 0).double().mean()) < 0.35
    zeros = (ratio == 0)[0]
    assert not torch.equal(zeros[:8, :, :8], zeros[8:, :, 8:])
    assert not torch.equal(zeros[:8, :, :8], zeros[8:, :, :8])


def disagreeing(rank: int, ranks: int) -> list[str]:
    q = torch.randn(1, 16, 2, 4)
    said = []
    odd = rank == 1
    one_masks = torch.zeros(1, 16, dtype=torch.bool) if odd else None
    wrong_shape = torch.zeros(1, 15 if odd else 16, dtype=torch.bool)
    for given, training in ((one_masks, True), (wrong_shape, True), (None, not odd)):
        module = RingDilatedAttention([64], [2], dropout=0.5).train(training)
        try:
            module(q, q, q, False, given)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_mask_or_a_mode_on_one_rank_only_is_refused_by_all() -> None:
    found = all_returned(run(2, disagreeing))
    assert all("rank 1 runs with another dtype or other settings" in found[0][i] for i in (0, 2))
    assert "key_padding_mask=none, dropout_p=0.5" in found[0][0]
    assert "rank 0 runs with another dtype or other settings" in found[1][0]
    assert "rank 1 refused its input" in found[0][1]
    assert "key_padding_mask has shape (1, 15)" in found[1][1]
