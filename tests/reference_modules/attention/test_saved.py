"""What the function keeps: q, k, v, out and lse between forward and backward, no lease on any way out."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_modules.attention import dilated_attention
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.fake_pool import CountingPool

BRANCHES = {"segment_lengths": [8, 16, 12], "dilation_rates": [1, 2, 4]}


def saved_by(run: Any) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return saved


def test_only_q_k_v_out_and_lse_are_saved() -> None:
    q, k, v, _ = numbers((2, 37, 3, 8), 0)
    kept: list[Tensor] = []
    saved = saved_by(lambda: kept.extend(dilated_attention(q, k, v, **BRANCHES, return_lse=True)))
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, *kept)]


def test_dropout_adds_a_seed_a_mask_itself_and_detached_mixing_the_parts() -> None:
    q, k, v, _ = numbers((2, 32, 3, 8), 0)
    mask = torch.zeros(2, 32, dtype=torch.bool)
    assert [
        x.numel() for x in saved_by(lambda: dilated_attention(q, k, v, **BRANCHES, dropout_p=0.5))[5:]
    ] == [1]
    assert saved_by(lambda: dilated_attention(q, k, v, **BRANCHES, key_padding_mask=mask))[5] is mask
    parts = saved_by(lambda: dilated_attention(q, k, v, **BRANCHES, detach_mixing=True))[5:]
    rows = sum(x.shape[:-1].numel() for x in parts[::2])
    assert rows == sum(x.numel() for x in parts[1::2])


@pytest.mark.filterwarnings(
    "ignore:out of memory on"
)  # what a refused lease is answered with, before giving up
@pytest.mark.parametrize("kernel", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"dropout_p": 0.3}, {"detach_mixing": True}])
def test_every_lease_is_given_back_wherever_the_pool_refuses(
    kernel: str, dtype: torch.dtype, extra: dict[str, Any]
) -> None:
    q, k, v, dout = numbers((2, 37, 3, 8), 0, dtype=dtype)

    def step(pool: CountingPool) -> None:
        out = dilated_attention(q, k, v, **BRANCHES, **extra, kernel=kernel, pool=pool)
        assert pool.outstanding == 0
        torch.autograd.grad(out, (q, k, v), dout)

    counted = CountingPool()
    step(counted)
    assert counted.outstanding == 0
    assert counted.taken > 0
    for k_th in range(counted.taken):
        failing = CountingPool(fail_at=k_th)
        with contextlib.suppress(MemoryError):  # a part that is small enough goes on without what was refused
            step(failing)
        assert failing.taken >= k_th
        assert failing.outstanding == 0


@pytest.mark.parametrize("extra", [{}, {"dropout_p": 0.3}, {"detach_mixing": True}, {"kernel": "plain"}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pooled_and_unpooled_agree_to_the_bit(extra: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v, dout = numbers((2, 37, 3, 8), 0, dtype=dtype)
    found = []
    for pool in (None, CountingPool()):  # its buffers come full of NaN
        torch.manual_seed(5)
        out = dilated_attention(q, k, v, **BRANCHES, **extra, pool=pool)
        found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_second_derivative_is_refused_and_a_first_under_create_graph_is_not() -> None:
    q, k, v, dout = numbers((1, 16, 2, 4), 0)
    out = dilated_attention(q, k, v, **BRANCHES)
    (plain,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    (again,) = torch.autograd.grad(out, q, dout, create_graph=True)
    assert torch.equal(plain, again)
    with pytest.raises(RuntimeError, match="dilated_attention has no second derivative"):
        torch.autograd.grad(again.sum(), q)


def test_only_some_inputs_need_a_gradient() -> None:
    q, k, v, dout = numbers((1, 16, 2, 4), 0)
    wanted = torch.autograd.grad(dilated_attention(q, k, v, **BRANCHES), v, dout)
    found = torch.autograd.grad(dilated_attention(q.detach(), k.detach(), v, **BRANCHES), v, dout)
    assert torch.equal(wanted[0], found[0])


def test_autocast_leaves_full_precision_alone() -> None:
    q, k, v, _ = numbers((1, 16, 2, 4), 0, dtype=torch.float32)
    expected = dilated_attention(q, k, v, **BRANCHES, kernel="plain")
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(dilated_attention(q, k, v, **BRANCHES, kernel="plain"), expected)


def test_lse_carries_no_gradient() -> None:
    q, k, v, _ = numbers((1, 16, 2, 4), 0)
    out, lse = dilated_attention(q, k, v, **BRANCHES, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
