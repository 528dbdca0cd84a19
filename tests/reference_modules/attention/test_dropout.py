"""Dropout falls on probabilities, is drawn again in the backward, and follows torch's seed."""

from __future__ import annotations

import torch

from reference_modules.attention import dilated_attention
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting

SETTING = Setting((8, 16), (1, 2))


def test_every_probability_is_dropped_or_scaled_up() -> None:
    n, p = 16, 0.25
    q, k, _ = numbers((1, n, 2, n), 0, 3)
    unit = (
        torch.eye(n, dtype=torch.float64).view(1, n, 1, n).expand(1, n, 2, n)
    )  # so that out is the probabilities
    one_branch = {"segment_lengths": [8], "dilation_rates": [1]}
    torch.manual_seed(0)
    dropped = dilated_attention(q, k, unit, **one_branch, dropout_p=p)
    kept = dilated_attention(q, k, unit, **one_branch)
    ratio = (dropped / kept)[kept > 0]
    is_zero = ratio == 0
    assert torch.all(is_zero | ((ratio - 1 / (1 - p)).abs() < 1e-12))
    assert 0.15 < float(is_zero.double().mean()) < 0.35


def test_the_gradient_is_that_of_the_same_draw() -> None:
    q, k, v, _ = numbers((1, 9, 2, 3), 0)

    def drawn_once(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return dilated_attention(*inputs, **SETTING.arguments(), dropout_p=0.4)

    assert torch.autograd.gradcheck(drawn_once, (q, k, v))


def test_the_mean_over_draws_is_attention_itself() -> None:
    q, k, v, _ = numbers((1, 16, 2, 4), 0)
    torch.manual_seed(1)
    with torch.no_grad():
        draws = torch.stack(
            [dilated_attention(q, k, v, **SETTING.arguments(), dropout_p=0.3) for _ in range(2000)]
        )
    expected, _ = oracle.joint(SETTING, q, k, v)
    standard_error = draws.std(0) / 2000**0.5
    assert torch.all((draws.mean(0) - expected).abs() <= 6 * standard_error + 1e-12)


def test_two_draws_differ_and_one_seed_repeats() -> None:
    q, k, v, _ = numbers((1, 16, 2, 4), 0)
    torch.manual_seed(1)
    first = dilated_attention(q, k, v, **SETTING.arguments(), dropout_p=0.3)
    second = dilated_attention(q, k, v, **SETTING.arguments(), dropout_p=0.3)
    torch.manual_seed(1)
    assert torch.equal(first, dilated_attention(q, k, v, **SETTING.arguments(), dropout_p=0.3))
    assert not torch.equal(first, second)
