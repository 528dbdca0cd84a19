"""Branches that cut the sequence evenly: gathered, mixed and summed in one pass each.

On a device the passes run there; else in Triton's interpreter, where a Triton is installed; else the tests
are skipped.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from reference_modules.attention import dilated_attention, even
from reference_modules.attention.autograd import attend, attend_backward
from reference_modules.attention.joint import Inputs, Plan
from reference_modules.attention.kernels import FlashCPU
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting

PROBLEMS = [  # segments, dilations, heads, batch
    ((16, 32, 64), (1, 2, 4), 8, 2),
    ((32, 64), (2, 4), 3, 1),  # rows of three heads that no branch gives a key
    ((16,), (4,), 6, 2),
    ((16, 64), (1, 1), 2, 1),
]
without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton: its passes cannot run")
without_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: this way is not taken"
)


def plan(
    segments: tuple[int, ...], dilations: tuple[int, ...], heads: int, rule: str = "paper", **rest: object
) -> Plan:
    options = {"causal": False, "scale": 0.25} | rest
    return Plan.of(list(zip(segments, dilations, strict=True)), heads, rule, **options)  # type: ignore[arg-type]


@without_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here: the next test runs the passes on it")
@pytest.mark.parametrize("rule", ["paper", "torchscale"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segments", "dilations", "heads", "batch"), PROBLEMS)
def test_passes_give_what_tiles_give(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    causal: bool,
    segments: tuple[int, ...],
    dilations: tuple[int, ...],
    heads: int,
    batch: int,
) -> None:
    monkeypatch.setattr(even, "torch_chooses", lambda _: FlashCPU())
    q, k, v, dout = (x.detach() for x in numbers((batch, 64, heads, 16), 0, dtype=torch.float32))
    inputs, chosen = Inputs.of(q, k, v), plan(segments, dilations, heads, rule, causal=causal)
    out, lse, _ = attend(inputs, chosen, None, None)
    grads = attend_backward(dout, inputs, out, lse, {}, chosen, None, None)
    branches = even._even_branches(chosen, 64)
    assert branches is not None
    found = branches.attend(inputs, None)
    assert found is not None
    found_grads = branches.gradients(dout, inputs, out, lse.float(), None)
    assert found_grads is not None
    assert oracle.largest_difference([*found, *found_grads], [out, lse, *grads]) <= 1e-5


@pytest.mark.gpu
@without_device
@pytest.mark.parametrize("rule", ["paper", "torchscale"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segments", "dilations", "heads", "batch"), PROBLEMS)
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_on_a_device_against_the_oracle(
    rule: str,
    causal: bool,
    segments: tuple[int, ...],
    dilations: tuple[int, ...],
    heads: int,
    batch: int,
    fused_qkv: bool,
) -> None:
    setting = Setting(segments, dilations, causal, rule)
    q, k, v, dout = (x.detach() for x in numbers((batch, 128, heads, 64), 0, dtype=torch.bfloat16))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse64 = oracle.joint(setting, *exact)
    wanted = [expected, lse64, *oracle.gradients(expected, exact, dout.double())]
    local = [x.cuda() for x in (q, k, v)]
    if fused_qkv:  # views of one tensor, as a fused projection gives them
        local = list(torch.stack(local, 2).unbind(2))
    local = [x.detach().requires_grad_() for x in local]
    taken = even.EvenBranches.of(plan(segments, dilations, heads, rule), Inputs.of(*local))
    assert taken is not None
    out, lse = dilated_attention(*local, **setting.arguments(), return_lse=True)
    found = [out, lse, *oracle.gradients(out, local, dout.cuda())]
    assert oracle.largest_difference([x.detach().cpu() for x in found], wanted) <= 5e-2


@pytest.mark.gpu
@without_device
def test_the_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = (
        x.detach().cuda().requires_grad_() for x in numbers((1, 2048, 8, 64), 0, dtype=torch.float16)
    )
    found = []
    for _ in range(2):
        out = dilated_attention(
            q, k, v, segment_lengths=[256, 512, 1024], dilation_rates=[1, 2, 4], is_causal=True
        )
        assert isinstance(out, torch.Tensor)
        found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
        monkeypatch.setattr(even, "triton_serves", lambda: False)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("segments", "dilations", "options"),
    [
        ((48,), (1,), {}),  # does not divide the sequence
        ((16, 64), (1, 3), {}),  # a dilation that does not divide its segment
        ((16,), (1,), {"dropout": 0.1}),
        ((16,), (1,), {"detach_mixing": True}),
        ((16,), (1,), {"scale": -1.0}),
        ((16,), (1,), {"kernel": "plain"}),
    ],
)
def test_what_is_left_to_tiles(
    segments: tuple[int, ...], dilations: tuple[int, ...], options: dict[str, object]
) -> None:
    assert even._even_branches(plan(segments, dilations, 4, **options), 64) is None


def test_the_cpu_is_left_to_tiles() -> None:
    q, k, v = (torch.zeros(1, 64, 4, 16, dtype=torch.bfloat16) for _ in range(3))
    assert even.EvenBranches.of(plan((16,), (1,), 4), Inputs.of(q, k, v)) is None


def test_a_segment_longer_than_the_sequence_is_one_segment() -> None:
    found = even._even_branches(plan((16, 1000), (1, 4), 4), 64)
    assert found is not None
    assert found.rows == (16, 16)
