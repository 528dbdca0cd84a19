"""float32, bfloat16 and float16 against the float64 oracle, measured by what dense attention gets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_modules.attention import dilated_attention, precision
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers, settings_of_branches
from tests.reference_modules.attention.oracle import Setting

SHAPES = st.tuples(st.integers(1, 2), st.integers(1, 70), st.integers(1, 5), st.sampled_from([1, 8, 64]))
SEEDS = st.integers(0, 1 << 30)


def dense_sdpa(setting: Setting, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's dense attention in the inputs' type with the joint mask as a bias: the error bar."""
    _, n, h, _ = q.shape
    multiplicity = sum(allowed.float() for allowed in oracle.allowed_by_branch(setting, n, h))
    assert isinstance(multiplicity, Tensor)
    bias = multiplicity.log().to(q.dtype)
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)
    covered = multiplicity.sum(-1) > 0
    return torch.where(covered[..., None], out, 0.0).transpose(1, 2)


def exact(setting: Setting, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = oracle.joint(setting, *doubled)
    return [out, *oracle.gradients(out, doubled, dout.double())]


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_branches(), shape=SHAPES, seed=SEEDS)
def test_float32_with_scores_within_one(setting: Setting, shape: tuple[int, ...], seed: int) -> None:
    d = shape[-1]
    q, k, v, dout = numbers(shape, seed, dtype=torch.float32)
    with torch.no_grad():
        for x in (q, k):  # |q·k| ≤ |q|·|k| ≤ sqrt(d), so every scaled score lies within 1
            x.mul_(d**0.25 / x.norm(dim=-1, keepdim=True).clamp_min(1e-6))
    out, lse = dilated_attention(q, k, v, **setting.arguments(), return_lse=True)
    doubled = [x.detach().double() for x in (q, k, v)]
    found = [out, lse, *oracle.gradients(out, (q, k, v), dout)]
    out64, *gradients64 = exact(setting, [q, k, v], dout)
    wanted = [out64, oracle.joint(setting, *doubled)[1], *gradients64]
    assert oracle.largest_difference(found, wanted) <= 2e-6


LARGE = [
    (Setting((64,), (1,)), 64),
    (Setting((16, 32, 64), (1, 2, 4)), 64),
    (Setting((16, 32, 64), (1, 2, 4), True), 100),
    (Setting((13, 40), (3, 7), True, "torchscale"), 77),
]


@pytest.mark.parametrize("size", [10.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize(("setting", "n"), LARGE)
def test_float32_with_large_scores(setting: Setting, n: int, size: float) -> None:
    errors, bars = over_draws(setting, n, torch.float32, size)
    assert torch.all(errors <= 2 * bars + 1e-6), (errors, bars)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("setting", "n"), LARGE)
def test_half_precision(setting: Setting, n: int, dtype: torch.dtype) -> None:
    errors, bars = over_draws(setting, n, dtype, None)
    assert torch.all(errors <= 2 * bars + 1e-3), (errors, bars)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(setting=settings_of_branches(), shape=SHAPES, seed=SEEDS, size=st.floats(1.0, 1e4))
def test_float32_whatever_is_drawn(setting: Setting, shape: tuple[int, ...], seed: int, size: float) -> None:
    inputs, dout = with_scores(setting, shape, seed, torch.float32, size)
    for error, bar in errors_and_bars(setting, inputs, dout):
        assert error <= 2 * bar + 1e-6


@settings(max_examples=120, deadline=None, derandomize=True)
@given(setting=settings_of_branches(), shape=SHAPES, seed=SEEDS, size=st.floats(1.0, 32.0))
def test_a_lone_key_leaves_nothing_in_dk(
    setting: Setting, shape: tuple[int, ...], seed: int, size: float
) -> None:
    """One to five rows, where many see a single key."""
    shape = (shape[0], 1 + shape[1] % 5, *shape[2:])
    inputs, dout = with_scores(setting, shape, seed, torch.float32, size)
    for error, bar in errors_and_bars(setting, inputs, dout):
        assert error <= 2 * bar + 1e-6


# Between about 3 and 32 the larger problems' way misses by luck where rows are this few (docs/attention.md).
SIZES = st.sampled_from([3.0, 40.0, 100.0, 3e3, 1e4])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(setting=settings_of_branches(), shape=SHAPES, seed=SEEDS, size=SIZES)
def test_float32_the_way_larger_problems_go(
    setting: Setting, shape: tuple[int, ...], seed: int, size: float
) -> None:
    inputs, dout = with_scores(setting, shape, seed, torch.float32, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "FEW_PAIRS", 0)
        found = errors_and_bars(setting, inputs, dout)
    for error, bar in found:
        assert error <= 2 * bar + 1e-6


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    setting=settings_of_branches(),
    shape=SHAPES,
    seed=SEEDS,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_half_precision_whatever_is_drawn(
    setting: Setting, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    within_the_bar(setting, shape, seed, dtype)


@pytest.mark.xfail(strict=True, reason="out is saved rounded, and dk is reckoned with it")
def test_a_draw_beyond_the_bar() -> None:
    """Found by chance; of 4,000 draws of this shape four are."""
    within_the_bar(Setting((2,), (1,)), (1, 30, 3, 1), 3, torch.bfloat16)


def within_the_bar(setting: Setting, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    """Rounding the answer itself may cost half a unit, from which luck spares the bar where rows are few."""
    inputs, dout = with_scores(setting, shape, seed, dtype, None)
    rounding = max(1e-3, torch.finfo(dtype).eps / 2)
    for error, bar in errors_and_bars(setting, inputs, dout):
        assert error <= 2 * bar + rounding


def with_scores(
    setting: Setting, shape: tuple[int, ...], seed: int, dtype: torch.dtype, size: float | None
) -> tuple[list[Tensor], Tensor]:
    """q, k, v and an outgoing gradient; `size` is that of the largest score that counts, None for any."""
    q, k, v, dout = numbers(shape, seed, dtype=dtype)
    if size is not None:
        with torch.no_grad():
            scores = torch.einsum("bthd,bshd->bhts", q, k) * shape[-1] ** -0.5
            allowed = sum(x.float() for x in oracle.allowed_by_branch(setting, *shape[1:3]))
            largest = scores.masked_fill(allowed == 0, -torch.inf).amax(-1)
            found = largest[largest.isfinite()].abs()
            q.mul_(size / found.max() if found.numel() else 1.0)
    return [q, k, v], dout


def over_draws(setting: Setting, n: int, dtype: torch.dtype, size: float | None) -> tuple[Tensor, Tensor]:
    """(8 draws, 4 tensors) of errors and of error bars."""
    found = [
        errors_and_bars(setting, *with_scores(setting, (1, n, 4, 64), seed, dtype, size)) for seed in range(8)
    ]
    errors, bars = torch.tensor(found, dtype=torch.float64).unbind(-1)
    return errors, bars


def errors_and_bars(setting: Setting, inputs: list[Tensor], dout: Tensor) -> list[tuple[float, float]]:
    """For out, dq, dk and dv: the largest error of ours and of torch's dense attention."""
    out = dilated_attention(*inputs, **setting.arguments())
    dense = dense_sdpa(setting, *inputs)
    wanted = exact(setting, inputs, dout)
    found = [out, *oracle.gradients(out, inputs, dout)]
    reference = [dense, *oracle.gradients(dense, inputs, dout)]
    assert all(x.dtype == inputs[0].dtype for x in found)
    return [
        (
            float((ours.detach().double() - truth.detach()).abs().max()),
            float((theirs.detach().double() - truth.detach()).nan_to_num(0.0).abs().max()),
        )
        for ours, theirs, truth in zip(found, reference, wanted, strict=True)
    ]


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_scores_of_ten_thousand_stay_finite(kernel: str) -> None:
    q, k, v, dout = numbers((1, 64, 2, 16), 0, dtype=torch.float32)
    with torch.no_grad():
        q.mul_(1e4)
    out = dilated_attention(q, k, v, segment_lengths=[16, 64], dilation_rates=[1, 2], kernel=kernel)
    assert all(x.isfinite().all() for x in (out, *oracle.gradients(out, (q, k, v), dout)))
