"""flex_attention as a second way: the same numbers from another code path."""

from __future__ import annotations

import pytest
import torch

from reference_modules.attention import dilated_attention
from reference_modules.attention.flex import flex_dilated_attention
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")


@pytest.mark.parametrize("rule", ["paper", "torchscale"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("segments", "dilations"), [((16, 32, 64), (1, 2, 4)), ((13, 40), (3, 7))])
def test_two_ways_agree(
    rule: str, causal: bool, segments: tuple[int, ...], dilations: tuple[int, ...]
) -> None:
    q, k, v = (x.detach() for x in numbers((2, 77, 3, 8), 0, 3))
    setting = Setting(segments, dilations, causal, rule)
    found = dilated_attention(q, k, v, **setting.arguments(), return_lse=True)
    second = flex_dilated_attention(q, k, v, **setting.arguments())
    assert oracle.largest_difference(found, second) <= 1e-6  # flex keeps its lse in float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the compiled kernel needs one")
def test_two_ways_agree_compiled_on_a_gpu() -> None:
    setting = Setting((256, 512, 1024), (1, 2, 4), True)
    q, k, v, _ = (x.detach().cuda() for x in numbers((1, 2048, 8, 64), 0, dtype=torch.bfloat16))
    found = dilated_attention(q, k, v, **setting.arguments())
    second, _ = flex_dilated_attention(q, k, v, **setting.arguments(), compiled=True)
    torch.testing.assert_close(found, second, atol=2e-2, rtol=2e-2)
