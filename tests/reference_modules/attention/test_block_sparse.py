"""Block-sparse attention against the dense oracle, on one device and around rings; the pattern cache."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_modules.attention import (
    BlockPattern,
    BlockSparseRingDilatedAttention,
    CacheStats,
    DilatedAttention,
    PatternCache,
    shard,
    unshard,
)
from reference_modules.pool import TensorPool
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers
from tests.reference_modules.attention.oracle import Setting
from tests.reference_modules.attention.ranks import all_returned, run

PATTERNS = {
    "window": BlockPattern(block_size=4, local=1),
    "own block": BlockPattern(block_size=8, local=0),
    "strided": BlockPattern(block_size=4, local=0, stride=3),
    "global": BlockPattern(block_size=4, local=0, global_blocks=2),
    "content": BlockPattern(block_size=4, local=0, content=2),
    "all": BlockPattern(block_size=2, local=2, stride=5, global_blocks=1, content=3),
}
SETTINGS = [((96,), (1,)), ((16, 96), (1, 3)), ((7, 30), (1, 4))]


def chosen(pattern: BlockPattern, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """(b, h, n, n) from the definition, block by block."""
    b, n, h, _ = q.shape
    size = pattern.block_size
    blocks = [slice(at, min(at + size, n)) for at in range(0, n, size)]
    seen = torch.zeros(b, h, n, n, dtype=torch.bool)
    for bi in range(b):
        for hi in range(h):
            for i, rows in enumerate(blocks):
                static = {
                    j
                    for j in range(len(blocks))
                    if abs(i - j) <= pattern.local
                    or (pattern.stride and (i - j) % pattern.stride == 0)
                    or i < pattern.global_blocks
                    or j < pattern.global_blocks
                }
                free = [j for j in range(len(blocks)) if j not in static and (j < i or not causal)]
                query = q[bi, rows.start, hi] if causal else q[bi, rows, hi].mean(0)
                fit = {j: float(query @ k[bi, blocks[j], hi].mean(0)) for j in free}
                best = sorted(free, key=lambda j: -fit[j])[: pattern.content]
                for j in [*static, *best]:
                    seen[bi, hi, rows, blocks[j]] = True
    return seen


def expected(
    setting: Setting, pattern: BlockPattern, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> list[Tensor]:
    multiplicity = sum(x.double() for x in oracle.allowed_by_branch(setting, *q.shape[1:3]))
    weight = multiplicity * chosen(pattern, q.detach(), k.detach(), setting.is_causal)
    out, _ = oracle.attention(q, k, v, weight.log())
    return [out, *oracle.gradients(out, (q, k, v), dout)]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [48, 45])
def test_one_device_against_the_definition(name: str, causal: bool, tokens: int) -> None:
    q, k, v, dout = numbers((2, tokens, 3, 4), 5)
    for segments, dilations in SETTINGS:
        module = BlockSparseRingDilatedAttention(segments, dilations, pattern=PATTERNS[name])
        out = module(q, k, v, causal)
        found = [out, *oracle.gradients(out, (q, k, v), dout)]
        setting = Setting(segments, dilations, causal)
        assert oracle.largest_difference(found, expected(setting, PATTERNS[name], q, k, v, dout)) <= 1e-10


def test_all_blocks_is_dilated_attention() -> None:
    q, k, v, dout = numbers((2, 45, 3, 4), 5)
    everything = BlockPattern(block_size=4, local=100)
    found = BlockSparseRingDilatedAttention([16, 32], [1, 2], pattern=everything)(q, k, v, True)
    wanted = DilatedAttention([16, 32], [1, 2])(q, k, v, True)
    ours, theirs = ([x, *oracle.gradients(x, (q, k, v), dout)] for x in (found, wanted))
    assert oracle.largest_difference(ours, theirs) <= 1e-12


@pytest.mark.parametrize("name", PATTERNS)
def test_changing_the_last_token_changes_no_earlier_row(name: str) -> None:
    q, k, v, _ = numbers((1, 47, 2, 4), 5, dtype=torch.float32)
    module = BlockSparseRingDilatedAttention([96], [1], pattern=PATTERNS[name])
    before = module(q, k, v, True)
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[:, -1] *= -30
    assert torch.equal(before[:, :-1], module(*changed, True)[:, :-1])


def on_a_rank(rank: int, ranks: int) -> tuple[list[Any], int]:
    pool = TensorPool("cpu", threshold_mb=0)
    q, k, v, dout = numbers((2, 48, 3, 4), 5)
    found = []
    for name, placement, causal in CASES:
        module = BlockSparseRingDilatedAttention(
            (16, 96), (1, 3), pattern=PATTERNS[name], placement=placement, enable_memory_pool=True, pool=pool
        )
        local = [shard(x.detach(), rank, ranks, placement).requires_grad_() for x in (q, k, v)]
        out = module(*local, is_causal=causal)
        grads = torch.autograd.grad(out, local, shard(dout, rank, ranks, placement))
        found.append([x.detach().numpy() for x in (out, *grads)])
    return found, pool.stats().leases


CASES = [
    (name, "zigzag" if causal else "contiguous", causal)
    for name in ("window", "strided", "global", "content", "all")
    for causal in (False, True)
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_around_a_ring_the_numbers_of_the_definition(ranks: int) -> None:
    returned = all_returned(run(ranks, on_a_rank))
    assert [leases for _, leases in returned] == [0] * ranks
    q, k, v, dout = numbers((2, 48, 3, 4), 5)
    for i, (name, placement, causal) in enumerate(CASES):
        parts = [[torch.from_numpy(x) for x in found[i]] for found, _ in returned]
        whole = [unshard([part[j] for part in parts], placement) for j in range(4)]
        wanted = expected(Setting((16, 96), (1, 3), causal), PATTERNS[name], q, k, v, dout)
        assert oracle.largest_difference(whole, wanted) <= 1e-10, CASES[i]


def test_the_cache_computes_a_pattern_once_and_content_never_enters_it() -> None:
    cache = PatternCache()
    q, k, v, _ = numbers((1, 48, 3, 4), 5)

    def call(pattern: BlockPattern, **options: Any) -> None:
        BlockSparseRingDilatedAttention([96], [1], pattern=pattern, pattern_cache=cache, **options)(q, k, v)

    call(PATTERNS["window"])
    misses = cache.stats().misses
    assert misses == 1
    call(PATTERNS["window"])
    assert cache.stats().misses == 1
    assert cache.stats().hits > 0
    assert cache.stats().entries == 1
    call(PATTERNS["strided"])
    assert cache.stats().entries == 2
    before = cache.stats()
    call(PATTERNS["content"])
    call(PATTERNS["window"], use_pattern_cache=False)
    assert cache.stats() == before


def test_the_cache_is_bounded_and_forgets_the_longest_unused() -> None:
    cache = PatternCache(max_entries=2)
    for key in ("a", "b", "a", "c", "a", "b"):
        cache.get(key, lambda: ())
    assert cache.stats() == CacheStats(hits=2, misses=4, evictions=2, entries=2)
    cache.clear()
    assert cache.stats().entries == 0
    with pytest.raises(ValueError, match="max_entries is 0"):
        PatternCache(0)


def test_the_cache_under_threads_keeps_one_result() -> None:
    cache = PatternCache()
    kept: list[Any] = []
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        kept.extend(id(cache.get(key, lambda: (object(),))[0]) for key in range(50))  # type: ignore[arg-type, return-value]

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(kept)) == 50
    assert cache.stats().entries == 50


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be an int of at least 1"),
        ({"stride": 0}, "stride is 0; it must be an int of at least 1, or None"),
        ({"local": -1}, "local is -1; it must be an int of at least 0"),
    ],
)
def test_impossible_patterns_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPattern(**fields)
