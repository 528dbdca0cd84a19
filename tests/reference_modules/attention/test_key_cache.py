"""With a key cache: the same numbers as without, at the price of a token, and nothing stays leased."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_modules.attention import (
    DilatedAttention,
    DilatedTransformerEncoderLayer,
    KeyCache,
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    RingMultiheadDilatedAttention,
    dilated_attention,
)
from reference_modules.attention import long_net as long_net_file
from reference_modules.pool import TensorPool, set_memory_pool
from tests.reference_modules.attention import oracle
from tests.reference_modules.attention.drawn import numbers, settings_of_branches, shapes
from tests.reference_modules.attention.oracle import Setting


def a_cache(b: int, tokens: int, h: int, d: int) -> KeyCache:
    return KeyCache(*(torch.full((b, tokens, h, d), float("nan"), dtype=torch.float64) for _ in range(2)))


@settings(max_examples=80, deadline=None)
@given(
    setting=settings_of_branches(), shape=shapes(), cuts=st.lists(st.integers(1, 9)), seed=st.integers(0, 99)
)
def test_in_any_pieces_it_is_the_whole_causal_attention(
    setting: Setting, shape: tuple[int, ...], cuts: list[int], seed: int
) -> None:
    q, k, v = (x.detach() for x in numbers(shape, seed, 3))
    options: Any = {**setting.arguments(), "is_causal": True}
    expected = dilated_attention(q, k, v, **options)
    branches = (setting.segment_lengths, setting.dilation_rates)
    module = DilatedAttention(*branches, offset_rule=setting.offset_rule)
    cache, found, at = a_cache(*shape), [], 0
    for length in [*cuts, shape[1]]:
        piece = slice(at, min(at + length, shape[1]))
        if piece.start < piece.stop:
            found.append(module.extend(q[:, piece], *cache.append(k[:, piece], v[:, piece])))
        at = piece.stop
    assert oracle.largest_difference([torch.cat(found, 1)], [expected]) <= 1e-12


@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_token_by_token_through_a_layer(num_kv_heads: int | None) -> None:
    torch.manual_seed(0)
    layer = (
        DilatedTransformerEncoderLayer(32, 4, [8, 12, 20], [1, 2, 3], num_kv_heads=num_kv_heads)
        .double()
        .eval()
    )
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x, True)
        cache = a_cache(2, 30, 4, 8)
        pieces = [x[:, :11], *x[:, 11:].split(1, 1)]
        found = torch.cat([layer(piece, True, cache=cache) for piece in pieces], 1)
    assert cache.tokens == 30
    assert oracle.largest_difference([found], [expected]) <= 1e-12


def model(**changes: Any) -> LongNet:
    torch.manual_seed(0)
    config = LongNetConfig(vocab_size=17, embed_dim=32, num_heads=4, depth=2, segment_lengths=(8, 16),
                           dilation_rates=(1, 2), **changes)  # fmt: skip
    return LongNet(config).double().eval()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"end_token": 3}]
)
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1, "offset_rule": "torchscale"}])
def test_generation_is_the_same_with_and_without(options: dict[str, Any], changes: dict[str, Any]) -> None:
    net = model(**changes)
    start = torch.randint(17, (3, 5), generator=torch.Generator().manual_seed(1))
    found = [
        net.generate(start, 30, use_cache=switch, generator=torch.Generator().manual_seed(2), **options)
        for switch in (True, False)
    ]
    assert torch.equal(*found)


def test_every_token_goes_through_the_layers_once() -> None:
    net = model()
    seen: list[int] = []
    net.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    net.generate(torch.zeros(1, 5, dtype=torch.long), 4)
    assert seen == [5, 1, 1, 1]


def test_the_cache_comes_from_the_pool_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    start = torch.zeros(2, 5, dtype=torch.long)
    expected = net.generate(start, 9)
    pool = TensorPool("cpu", threshold_mb=0)
    set_memory_pool(net, pool)
    assert torch.equal(net.generate(start, 9), expected)
    stats = pool.stats()
    assert (stats.leases, stats.abandoned) == (0, 0)
    assert stats.peak_bytes_in_use >= 2 * 2 * (2 * 14 * 32) * 8  # two layers' keys and values

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("no more tokens")

    monkeypatch.setattr(long_net_file, "_choose", refuse)
    with pytest.raises(RuntimeError, match="no more tokens"):
        net.generate(start, 9)
    assert pool.stats().leases == 0


def test_wrong_use_is_refused() -> None:
    module = MultiheadDilatedAttention(32, 4, [8], [1], dtype=torch.float64).eval()
    x = torch.zeros(1, 4, 32, dtype=torch.float64)
    cache = a_cache(1, 6, 4, 8)
    with pytest.raises(ValueError, match="that need a gradient do not go into a cache: call under"):
        module(x, x, x, is_causal=True, cache=cache)
    with torch.no_grad():
        with pytest.raises(
            ValueError, match=r"with a cache: is_causal False.*pass is_causal=True and no mask"
        ):
            module(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="key_padding_mask given"):
            mask = torch.zeros(1, 4, dtype=torch.bool)
            module(x, x, x, is_causal=True, cache=cache, key_padding_mask=mask)
        module(x, x, x, is_causal=True, cache=cache)
        with pytest.raises(
            ValueError, match="8 tokens do not fit into a cache of 6; make it as long as prompt"
        ):
            module(x, x, x, is_causal=True, cache=cache)
        assert cache.tokens == 4
        two = x.expand(2, 4, 32)
        with pytest.raises(
            ValueError, match=r"new keys have shape \(2, 4, 4, 8\).*takes \(1, tokens, 4, 8\)"
        ):
            module(two, two, two, is_causal=True, cache=cache)
        ring = RingMultiheadDilatedAttention(32, 4, [8], [1], dtype=torch.float64)
        with pytest.raises(ValueError, match="no rank holds the whole past, so generate on one device"):
            ring(x, x, x, is_causal=True, cache=cache)
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(
        ValueError, match=r"q has shape \(1, 4, 2, 8\) and k \(1, 3, 2, 8\); q must be the last"
    ):
        DilatedAttention([8], [1]).extend(q, q[:, :3], q[:, :3])
    with pytest.raises(ValueError, match=r"tokens have shape \(3,\)"):
        model().generate(torch.zeros(3, dtype=torch.long), 1)
