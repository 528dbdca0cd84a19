"""Measures from which size reuse wins on this machine: several buffers live and freed together, every page
touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch

SIZES_MB = (64, 32, 16, 8, 4, 2, 1)
TOGETHER_MB = 128
"""Buffers live at once, in bytes: one buffer taken and given back in a loop tells nothing about a heap."""
MOST_TOGETHER = 8
ROUNDS = 5
WINS = 1.15
"""Reuse must be faster by this factor; a tie is no reason to hold memory."""
NEVER_MB = float(1 << 20)
"""The threshold where reuse won at no size: the pool steps aside for everything below a terabyte."""


def measure() -> float:
    """The smallest size in MB from which on reuse wins at every larger size measured too."""
    threshold = NEVER_MB
    for size_mb in SIZES_MB:
        if not _reuse_wins(size_mb << 20):
            break
        threshold = float(size_mb)
    return threshold


def _reuse_wins(nbytes: int) -> bool:
    from reference_modules.pool.tensor_pool import TensorPool

    count = max(2, min(MOST_TOGETHER, (TOGETHER_MB << 20) // nbytes))
    pool = TensorPool(threshold_mb=0, name="calibration")

    def pooled() -> None:
        with ExitStack() as held:
            for _ in range(count):
                held.enter_context(pool.lease((nbytes,), torch.uint8)).fill_(1)

    def plain() -> None:
        held = [torch.empty((nbytes,), dtype=torch.uint8).fill_(1) for _ in range(count)]
        del held

    pooled()
    plain()
    return _seconds(plain) > WINS * _seconds(pooled)


def _seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
