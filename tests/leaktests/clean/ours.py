"""The reference modules, with the pool off and on, each in every scenario."""

from __future__ import annotations

from functools import partial

import torch

from auditor.leaktests.support import SCENARIOS, make_step
from reference_modules.attention import (
    BlockSparseRingDilatedAttention,
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNet,
    MultiheadDilatedAttention,
    RingDilatedAttention,
)
from reference_modules.mixin import set_memory_pool
from reference_modules.pool import TensorPool


def _drawn(turn, number, *shape):
    """The same numbers in every turn: where scores are large, attention takes more operations."""
    generator = torch.Generator().manual_seed(turn)
    return tuple(torch.randn(1, 16 + 4 * turn, *shape, generator=generator) for _ in range(number)), {}


def _heads(turn):
    return _drawn(turn, 3, 4, 8)


def _wide(turn):
    return _drawn(turn, 1, 32)


def _wide_thrice(turn):
    return _drawn(turn, 3, 32)


def _wide_twice(turn):
    return _drawn(turn, 2, 32)


def _tokens(turn):
    return (torch.randint(0, 11, (1, 16 + 4 * turn), generator=torch.Generator().manual_seed(turn)),), {}


S, R = [8, 16], [1, 2]
MODULES = {
    "DilatedAttention": (lambda: DilatedAttention(S, R), _heads),
    "MultiheadDilatedAttention": (lambda: MultiheadDilatedAttention(32, 4, S, R), _wide_thrice),
    "RingDilatedAttention": (lambda: RingDilatedAttention(S, R), _heads),
    "BlockSparseRingDilatedAttention": (lambda: BlockSparseRingDilatedAttention(S, R), _heads),
    "DilatedTransformerEncoderLayer": (
        lambda: DilatedTransformerEncoderLayer(32, 4, S, R, dim_feedforward=32),
        _wide,
    ),
    "DilatedTransformerDecoderLayer": (
        lambda: DilatedTransformerDecoderLayer(32, 4, S, R, dim_feedforward=32),
        _wide_twice,
    ),
    "LongNet": (
        lambda: LongNet(
            vocab_size=11, embed_dim=32, num_heads=4, depth=2, segment_lengths=(8, 16), dilation_rates=(1, 2)
        ),
        _tokens,
    ),
}
POOLS = {"off": None, "small blocks": 0.0, "as it is": 16.0}


def makers():
    """One maker a module and pool."""
    return {f"ours.{name}, pool {pool}": partial(_steps, name, pool) for name in MODULES for pool in POOLS}


def built(name: str, pool: TensorPool | None):
    """A module with its pooled parts on this pool."""
    module = MODULES[name][0]()
    set_memory_pool(module, pool)
    return module


def _steps(name, threshold):
    pool = None if POOLS[threshold] is None else TensorPool(threshold_mb=POOLS[threshold])
    feed = MODULES[name][1]
    return {scenario: make_step(lambda: built(name, pool), feed, scenario) for scenario in SCENARIOS}
