"""The CUDA kernels against the oracle; without a device these are skipped and say nothing."""

from __future__ import annotations

import pytest
import torch

from reference_modules.attention import dilated_attention
from reference_modules.attention.kernels import EfficientCUDA, FlashCUDA, Need, choose
from reference_modules.attention.plain import Plain
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: its kernels cannot run"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segments", "dilations"), [((16, 32, 64), (1, 2, 4)), ((13, 40), (3, 7))])
def test_against_the_oracle(
    dtype: torch.dtype, causal: bool, segments: tuple[int, ...], dilations: tuple[int, ...]
) -> None:
    setting = Setting(segments, dilations, causal)
    q, k, v, dout = (x.detach() for x in numbers((2, 77, 8, 64), 0, dtype=dtype))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse64 = oracle.joint(setting, *exact)
    wanted = [expected, lse64, *oracle.gradients(expected, exact, dout.double())]
    local = [x.cuda().requires_grad_() for x in (q, k, v)]
    out, lse = dilated_attention(*local, **setting.arguments(), return_lse=True)
    found = [out, lse, *oracle.gradients(out, local, dout.cuda())]
    bound = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 5e-2)
    assert oracle.largest_difference([x.detach().cpu() for x in found], wanted) <= bound


def test_which_kernel_is_taken() -> None:
    device = torch.device("cuda")

    def kind(dtype: torch.dtype, head_dim: int, masked: bool = False, dropout: float = 0.0) -> type:
        return type(choose(Need(device, dtype, head_dim, masked, dropout, 1.0), "auto", None, 0))

    assert kind(torch.bfloat16, 64) in (FlashCUDA, EfficientCUDA)
    assert kind(torch.float32, 64) is EfficientCUDA
    assert kind(torch.float64, 64) is Plain
    assert kind(torch.bfloat16, 20) is Plain
    assert kind(torch.bfloat16, 64, masked=True) is Plain
    assert kind(torch.bfloat16, 64, dropout=0.1) is Plain
