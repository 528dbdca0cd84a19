"""float64 against the oracle: out, lse and every gradient within 1e-10, whatever is drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_modules.attention import dilated_attention
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers, settings_of_branches, shapes
from tests.reference_modules.attention.oracle import Setting

KERNELS = st.sampled_from(["auto", "plain"])
SEEDS = st.integers(0, 1 << 30)


@settings(max_examples=150, deadline=None)
@given(setting=settings_of_branches(), shape=shapes(), kernel=KERNELS, seed=SEEDS)
def test_out_lse_and_gradients(setting: Setting, shape: tuple[int, ...], kernel: str, seed: int) -> None:
    q, k, v, dout = numbers(shape, seed)
    scale = [None, 0.3, -1.1, 0.0][seed % 4]
    out, lse = dilated_attention(q, k, v, **setting.arguments(), scale=scale, return_lse=True, kernel=kernel)
    expected, expected_lse = oracle.joint(setting, q, k, v, scale)
    found = [out, lse, *oracle.gradients(out, (q, k, v), dout)]
    wanted = [expected, expected_lse, *oracle.gradients(expected, (q, k, v), dout)]
    assert oracle.largest_difference(found, wanted) <= 1e-10


@settings(max_examples=80, deadline=None)
@given(setting=settings_of_branches(), shape=shapes(), kernel=KERNELS, seed=SEEDS)
def test_key_padding_mask(setting: Setting, shape: tuple[int, ...], kernel: str, seed: int) -> None:
    q, k, v, dout = numbers(shape, seed)
    ignored = torch.rand(shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.5
    found, lse = dilated_attention(
        q, k, v, **setting.arguments(), key_padding_mask=ignored, return_lse=True, kernel=kernel
    )
    expected, expected_lse = oracle.joint(setting, q, k, v, ignored_BN=ignored)
    all_found = [found, lse, *oracle.gradients(found, (q, k, v), dout)]
    wanted = [expected, expected_lse, *oracle.gradients(expected, (q, k, v), dout)]
    assert oracle.largest_difference(all_found, wanted) <= 1e-10


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_branches(), shape=shapes(), kernel=KERNELS, seed=SEEDS)
def test_detached_mixing(setting: Setting, shape: tuple[int, ...], kernel: str, seed: int) -> None:
    q, k, v, dout = numbers(shape, seed)
    out = dilated_attention(q, k, v, **setting.arguments(), detach_mixing=True, kernel=kernel)
    expected = oracle.detached_mixing(setting, q, k, v)
    found = [out, *oracle.gradients(out, (q, k, v), dout)]
    assert oracle.largest_difference(found, [expected, *oracle.gradients(expected, (q, k, v), dout)]) <= 1e-10


@settings(max_examples=40, deadline=None)
@given(setting=settings_of_branches(), shape=shapes(), seed=SEEDS)
def test_any_strides_do(setting: Setting, shape: tuple[int, ...], seed: int) -> None:
    b, n, h, d = shape
    q, k, v, _ = numbers(shape, seed)
    transposed = q.detach().permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    fused = torch.stack([k.detach(), v.detach()], dim=3)
    out = dilated_attention(transposed, fused[:, :, :, 0], fused[:, :, :, 1], **setting.arguments())
    assert oracle.largest_difference([out], [oracle.joint(setting, q, k, v)[0]]) <= 1e-10
    one_key = k.detach()[:, :, :1].expand(b, n, h, d)
    out = dilated_attention(q, one_key, v, **setting.arguments())
    assert oracle.largest_difference([out], [oracle.joint(setting, q, one_key, v)[0]]) <= 1e-10


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_changing_the_last_token_changes_no_earlier_row(kernel: str) -> None:
    setting = Setting((8, 13, 40), (1, 3, 4), True)
    q, k, v, _ = numbers((2, 37, 4, 8), 1, dtype=torch.float32)
    before = dilated_attention(q, k, v, **setting.arguments(), kernel=kernel)
    q2, k2, v2 = (x.detach().clone() for x in (q, k, v))
    for x in (q2, k2, v2):  # so large that its own row is computed in float64
        x[:, -1] = torch.randn_like(x[:, -1]) * 50
    after = dilated_attention(q2, k2, v2, **setting.arguments(), kernel=kernel)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_a_sequence_without_tokens() -> None:
    q = torch.zeros(2, 0, 3, 4, requires_grad=True)
    out, lse = dilated_attention(q, q, q, segment_lengths=[4], dilation_rates=[2], return_lse=True)
    assert out.shape == (2, 0, 3, 4)
    assert lse.shape == (2, 0, 3)
    out.sum().backward()


def test_slabs_and_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference_modules.attention import joint, plain

    setting = Setting((8, 16), (1, 2), True)
    q, k, v, dout = numbers((2, 100, 3, 8), 3)
    expected, _ = oracle.joint(setting, q, k, v)
    monkeypatch.setitem(joint.SLAB_BYTES, "cpu", 1)
    monkeypatch.setattr(plain, "_SCORES_PER_BLOCK", 50)
    for kernel in ("auto", "plain"):
        out = dilated_attention(q, k, v, **setting.arguments(), kernel=kernel)
        found = [out, *oracle.gradients(out, (q, k, v), dout)]
        wanted = [expected, *torch.autograd.grad(expected, (q, k, v), dout, retain_graph=True)]
        assert oracle.largest_difference(found, wanted) <= 1e-10
