"""The memory of one training step of dilated attention, measured against the formula in docs/attention.md.

    python benchmarks/attention_memory.py [--tokens 1048576] [--heads 1] [--dim 64]

A fresh process does a small step first, so that code and threads are loaded, then the large one.  Its peak
resident memory, less what was resident before, is the step's peak.  The C library is told to hand freed
blocks back to the kernel at once: what it would keep for later, up to 5 % here, is not the step's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from reference_modules.attention import dilated_attention
from reference_modules.attention.memory import step_bytes

SEGMENTS, DILATIONS = (2048, 4096, 8192), (1, 2, 4)
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def step(tokens: int, heads: int, dim: int) -> Tensor:
    """Forward and backward, all inputs and gradients alive at the end."""
    shape = (1, tokens, heads, dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = dilated_attention(q, k, v, segment_lengths=SEGMENTS, dilation_rates=DILATIONS, is_causal=True)
    assert isinstance(out, Tensor)
    out.backward(torch.ones_like(out))
    assert all(x.grad is not None and bool(x.grad.sum().isfinite()) for x in (q, k, v))
    return out


def status(field: str) -> int:
    """A line of this process's memory as the kernel counts it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    options = parser.parse_args()
    if not FREED_AT_ONCE.keys() <= os.environ.keys():  # read when a process begins
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | FREED_AT_ONCE)
    step(8192, options.heads, options.dim)
    before = status("VmRSS")
    begun = time.perf_counter()
    step(options.tokens, options.heads, options.dim)
    seconds = time.perf_counter() - begun
    measured = status("VmHWM") - before
    predicted = step_bytes(1, options.tokens, options.heads, options.dim, torch.float32, SEGMENTS, DILATIONS)
    print(
        json.dumps(
            {
                "tokens": options.tokens,
                "measured": measured,
                "predicted": predicted,
                "measured_over_predicted": round(measured / predicted, 4),
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
