"""What users get wrong with the modules: a ValueError that names the value, the limit and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reference_modules.attention import (
    BlockPattern,
    BlockSparseRingDilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNetConfig,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    create_long_net,
    dilated_attention,
    shard,
    unshard,
)

Q = torch.zeros(2, 16, 4, 8)
X = torch.zeros(2, 16, 32)
BRANCH: Any = ([8], [1])


def function(**changed: Any) -> Any:
    return dilated_attention(
        **{"q": Q, "k": Q, "v": Q, "segment_lengths": [8], "dilation_rates": [1], **changed}
    )


def heads(**options: Any) -> Any:
    return MultiheadDilatedAttention(32, 4, *BRANCH, **options)


def decoder(memory: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    return DilatedTransformerDecoderLayer(32, 4, *BRANCH)(X, memory, memory_key_padding_mask=mask)


def net(tokens: Any, **generation: Any) -> Any:
    model = create_long_net(5, embed_dim=8, num_heads=2, depth=1)
    return model.generate(tokens, **generation) if generation else model(tokens)


ONE = torch.tensor([[1]])
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: function(q=[1]), "q is a list; it must be a tensor: use torch.as_tensor"),
    (lambda: function(k=None), "k is None; it must be a tensor"),
    (lambda: function(v=Q.to_sparse()), "v has the layout torch.sparse_coo; only dense .* use to_dense"),
    (
        lambda: function(q=Q.to("meta"), k=Q.to("meta"), v=Q.to("meta")),
        "q is on meta, which holds no numbers",
    ),
    (lambda: function(k=Q[:, :, :2]), "k has shape .*repeat grouped keys to all heads"),
    (lambda: function(k=Q.transpose(1, 2)), r"k has shape \(2, 4, 16, 8\) and q \(2, 16, 4, 8\)"),
    (
        lambda: function(segment_lengths=8),
        "segment_lengths is 8; it must be a list or tuple of ints: one number",
    ),
    (lambda: function(segment_lengths=None), "segment_lengths is None; it must be a list or tuple"),
    (lambda: function(segment_lengths="8"), "segment_lengths is '8'; it must be a list or tuple"),
    (lambda: function(segment_lengths=torch.tensor([8])), "segment_lengths is a Tensor; .* use .tolist"),
    (lambda: function(dilation_rates=np.array([1])), "dilation_rates is a ndarray; .* use .tolist"),
    (
        lambda: function(dilation_rates=[-1]),
        "dilation_rates holds -1; every entry must be an int of at least 1",
    ),
    (lambda: function(scale="x"), "scale is 'x'; it must be a finite number"),
    (lambda: function(dropout_p=None), "dropout is None; it must be at least 0 and below 1"),
    (lambda: function(is_causal="yes"), "is_causal is 'yes'; it must be True or False"),
    (lambda: function(is_causal=torch.tensor(True)), "is_causal is a Tensor; it must be True or False"),
    (lambda: function(pool="x"), "pool is 'x'; it must have lease"),
    (lambda: function(key_padding_mask=[True]), "key_padding_mask is a list; it must be a tensor"),
    (lambda: MultiheadDilatedAttention(32, 4.0, *BRANCH), "32 does not split into 4.0 heads; choose"),  # type: ignore[arg-type]
    (lambda: MultiheadDilatedAttention(32, 0, *BRANCH), "32 does not split into 0 heads"),
    (lambda: heads(dropout=2), "dropout is 2; it must be at least 0 and below 1"),
    (
        lambda: heads(enable_memory_pool=True, memory_pool_threshold_mb=-1),
        "memory_pool_threshold_mb=-1 must be 0",
    ),
    (lambda: heads()(X, None, X), "key is None; it must be a tensor"),
    (
        lambda: heads()(X.double(), X, X),
        r"query is torch.float64 and the weights torch.float32; .* use query.to",
    ),
    (lambda: heads()(X, X.to("meta"), X), "key is on meta and the weights on cpu: move one"),
    (lambda: heads()(X, X, X, attn_mask="causal"), "attn_mask is 'causal'; it must be a tensor"),
    (
        lambda: DilatedTransformerEncoderLayer(32, 4, *BRANCH, dim_feedforward=0),
        "dim_feedforward is 0; .* or None",
    ),
    (
        lambda: DilatedTransformerEncoderLayer(32, 4, *BRANCH, dropout=1),
        "dropout is 1; it must be at least 0",
    ),
    (
        lambda: DilatedTransformerEncoderLayer(32, 4, *BRANCH, activation="silu"),
        "'silu'; it must be one of gelu, relu",
    ),
    (
        lambda: decoder(torch.zeros(3, 5, 32)),
        "memory has a batch of 3 and tgt one of 2; .* use memory.expand",
    ),
    (
        lambda: decoder(torch.zeros(2, 5, 16)),
        r"memory has shape \(2, 5, 16\); it must be \(batch, tokens, 32\)",
    ),
    (lambda: decoder(X, torch.zeros(2, 3, dtype=torch.bool)), r"memory_key_padding_mask has shape \(2, 3\)"),
    (lambda: LongNetConfig(vocab_size=5, embed_dim=30, num_heads=4), "30 does not split into 4 heads"),
    (lambda: LongNetConfig(vocab_size=5, num_kv_heads=3), "num_kv_heads 3 does not divide num_heads 8"),
    (lambda: LongNetConfig(vocab_size=5, dropout=1.5), "dropout is 1.5; it must be at least 0"),
    (lambda: LongNetConfig(vocab_size=5, feedforward_dim=0), "feedforward_dim is 0; .* or None for 4"),
    (lambda: LongNetConfig(vocab_size=5, depth="2"), "depth is '2'; it must be an int"),  # type: ignore[arg-type]
    (
        lambda: net(torch.tensor([[7]])),
        "tokens lie between 7 and 7; they must lie between 0 and 4: use a vocab_size",
    ),
    (
        lambda: net(torch.tensor([[1.0]])),
        "tokens have shape .* type torch.float32; they must be int64 or int32",
    ),
    (lambda: net([[1]]), "tokens is a list; it must be a tensor"),
    (lambda: net(ONE, max_new_tokens=1.5), "max_new_tokens is 1.5; it must be an int of at least 0"),
    (
        lambda: net(ONE, max_new_tokens=1, temperature=float("nan")),
        "temperature nan: .* a finite temperature of 0",
    ),
    (lambda: net(ONE, max_new_tokens=1, end_token=9), "end_token is 9; it must be within 0 and 4, or None"),
    (
        lambda: RingDilatedAttention(*BRANCH, placement="x"),
        "placement is 'x'; it must be one of contiguous, zigzag",
    ),
    (
        lambda: RingDilatedAttention(*BRANCH, timeout=5),
        r"timeout is 5; it must be a positive timedelta, as timedelta",
    ),  # type: ignore[arg-type]
    (
        lambda: RingDilatedAttention(*BRANCH, process_group=-100)(Q, Q, Q),
        "process_group is -100, which this rank is",
    ),  # type: ignore[arg-type]
    (lambda: RingDilatedAttention(*BRANCH, dropout=1), "dropout is 1; it must be at least 0"),
    (
        lambda: BlockSparseRingDilatedAttention(*BRANCH, pattern="local"),
        "pattern is 'local'; it must be a BlockPattern",
    ),  # type: ignore[arg-type]
    (
        lambda: BlockSparseRingDilatedAttention(*BRANCH, pattern_cache={}),
        "pattern_cache is {}; it must be a PatternC",
    ),  # type: ignore[arg-type]
    (
        lambda: BlockSparseRingDilatedAttention(*BRANCH)(Q, Q, Q, 1),
        "is_causal is 1; it must be True or False",
    ),
    (lambda: BlockPattern(block_size=2.5), "block_size is 2.5; it must be an int of at least 1"),  # type: ignore[arg-type]
    (lambda: shard(Q, 5, 4), "rank is 5; it must be within 0 and 3 where there are 4 ranks"),
    (lambda: shard(Q, 0, 4, "zig"), "placement is 'zig'; it must be one of"),  # type: ignore[arg-type]
    (lambda: unshard([]), "0 parts have the shapes .*; there must be one for each rank"),
    (
        lambda: unshard([Q, Q[:, :3]]),
        "2 parts have the shapes .*; there must be one for each rank, all alike",
    ),
    (lambda: unshard([Q[:, :3]], "zigzag"), "this rank holds 3 tokens; zigzag needs an even number"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_message(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        call()


def test_numpys_ints_lists_from_files_and_numbers_as_tensors_will_do() -> None:
    assert function(segment_lengths=[np.int64(8)], scale=torch.tensor(0.5)).shape == Q.shape
    config = LongNetConfig(vocab_size=5, segment_lengths=[8], dilation_rates=[1])  # type: ignore[arg-type]
    assert (config.segment_lengths, config.dilation_rates) == ((8,), (1,))


def test_autocast_may_mix_types() -> None:
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        assert heads()(X.bfloat16(), X.bfloat16(), X.bfloat16())[0].dtype is torch.bfloat16
