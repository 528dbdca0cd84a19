"""Memory is what the formula says: q, k, v, out and lse between the passes, and a peak linear in n."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference_modules.attention import dilated_attention
from reference_modules.attention.memory import saved_bytes, step_bytes
from tests.reference_modules.attention.drawn import numbers

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_bytes_to_the_byte(dtype: torch.dtype) -> None:
    q, k, v, _ = numbers((2, 37, 3, 8), 0, dtype=dtype)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        dilated_attention(q, k, v, segment_lengths=[8, 16], dilation_rates=[1, 2])
    assert len(saved) == 5
    assert sum(x.untyped_storage().nbytes() for x in saved) == saved_bytes(2, 37, 3, 8, dtype)


def test_the_peak_grows_linearly() -> None:
    def step(tokens: int) -> int:
        return step_bytes(1, tokens, 4, 64, torch.float32, [2048, 8192], [1, 4])

    assert step(1 << 22) - step(1 << 21) == (step(1 << 21) - step(1 << 20)) * 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("tokens", [1 << 16, pytest.param(1 << 18, marks=pytest.mark.slow)])
def test_a_step_takes_what_the_formula_predicts(tokens: int) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/attention_memory.py"), "--tokens", str(tokens)]
    found = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout
    )
    assert 0.95 <= found["measured_over_predicted"] <= 1.05, found
