"""The modules around dilated attention: nn.MultiheadAttention's weights and call, layers, pools, pickles."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from reference_modules.attention import (
    DilatedAttention,
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    MultiheadDilatedAttention,
    dilated_attention,
)
from reference_modules.pool import TensorPool, set_memory_pool
from tests.reference_modules.attention.drawn import numbers

BRANCHES = ([8, 16], [1, 2])


def test_module_is_the_function() -> None:
    q, k, v, _ = numbers((2, 37, 4, 8), 0)
    mask = torch.arange(37).expand(2, 37) >= 30
    found = DilatedAttention(*BRANCHES)(q, k, v, True, mask)
    expected = dilated_attention(
        q,
        k,
        v,
        segment_lengths=BRANCHES[0],
        dilation_rates=BRANCHES[1],
        is_causal=True,
        key_padding_mask=mask,
    )
    assert torch.equal(found, expected)


def test_dropout_only_in_training() -> None:
    q, k, v, _ = numbers((1, 16, 4, 8), 0)
    module = DilatedAttention(*BRANCHES, dropout=0.5)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), DilatedAttention(*BRANCHES)(q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_of_multihead_attention_fit_and_one_full_segment_is_dense(is_causal: bool) -> None:
    dense = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    nn.init.normal_(dense.in_proj_bias)
    ours = MultiheadDilatedAttention(32, 4, [64], [1], dtype=torch.float64)
    ours.load_state_dict(dense.state_dict())
    dense.load_state_dict(ours.state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    later = torch.ones(20, 20).triu(1).bool() if is_causal else None
    expected, _ = dense(x, x, x, attn_mask=later, need_weights=False)
    found, weights = ours(x, x, x, is_causal=is_causal)
    assert weights is None
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    apart, _ = ours(x, x.clone(), x.clone(), is_causal=is_causal)  # three products instead of the fused one
    torch.testing.assert_close(apart, expected, atol=1e-12, rtol=0)


def test_key_padding_means_what_it_means_there() -> None:
    dense = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    ours = MultiheadDilatedAttention(32, 4, [64], [1], dtype=torch.float64)
    ours.load_state_dict(dense.state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    mask = torch.arange(20) >= torch.tensor([[15], [20]])
    expected, _ = dense(x, x, x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, key_padding_mask=mask)[0], expected, atol=1e-12, rtol=0)


def test_grouped_keys_are_the_keys_repeated() -> None:
    grouped = MultiheadDilatedAttention(32, 4, *BRANCHES, num_kv_heads=2, dtype=torch.float64)
    full = MultiheadDilatedAttention(32, 4, *BRANCHES, dtype=torch.float64)
    q, k, v = torch.split(grouped.in_proj_weight.detach(), [32, 16, 16])
    repeated = [x.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32) for x in (k, v)]
    state = {
        **grouped.state_dict(),
        "in_proj_weight": torch.cat([q, *repeated]),
        "in_proj_bias": torch.zeros(96),
    }
    full.load_state_dict(state)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    torch.testing.assert_close(grouped(x, x, x)[0], full(x, x, x)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"need_weights": True}, "need_weights=True: the n × n weights are never formed"),
        (
            {"attn_mask": torch.zeros(4, 4)},
            r"attn_mask of shape \(4, 4\): segments and dilations are the mask",
        ),
        ({"query": torch.zeros(4, 32)}, r"query has shape \(4, 32\); it must be \(batch, tokens, 32\)"),
        ({"key": torch.zeros(2, 5, 32)}, r"k has shape \(2, 5, 4, 8\) and q \(2, 16, 4, 8\)"),
    ],
)
def test_what_multihead_refuses(arguments: dict[str, object], message: str) -> None:
    x = torch.zeros(2, 16, 32)
    with pytest.raises(ValueError, match=message):
        MultiheadDilatedAttention(32, 4, *BRANCHES)(**{"query": x, "key": x, "value": x, **arguments})


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="embed_dim 30 does not split into 4 heads"):
        MultiheadDilatedAttention(30, 4, *BRANCHES)
    with pytest.raises(ValueError, match="num_kv_heads 3 does not divide num_heads 4"):
        MultiheadDilatedAttention(32, 4, *BRANCHES, num_kv_heads=3)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_with_torch_weights_and_one_full_segment_is_torchs(norm_first: bool) -> None:
    options = {"dropout": 0.0, "norm_first": norm_first, "dim_feedforward": 48, "activation": "gelu"}
    theirs = nn.TransformerEncoderLayer(32, 4, batch_first=True, **options).double()
    ours = DilatedTransformerEncoderLayer(32, 4, [64], [1], **options).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layer_with_torch_weights_and_one_full_segment_is_torchs(norm_first: bool) -> None:
    theirs = nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True, norm_first=norm_first).double()
    ours = DilatedTransformerDecoderLayer(
        32, 4, [64], [1], dim_feedforward=48, activation="relu", norm_first=norm_first
    ).double()
    # torch numbers the norms by place, we by what they precede: self-attention 1, feed-forward 2, memory 3
    swap = {"norm2": "norm3", "norm3": "norm2"}
    renamed = {".".join([swap.get(key.split(".")[0], key.split(".")[0]), *key.split(".")[1:]]): x
               for key, x in theirs.state_dict().items()}  # fmt: skip
    ours.load_state_dict(renamed)
    x, memory = (torch.randn(2, n, 32, dtype=torch.float64) for n in (20, 13))
    later = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64)
    torch.testing.assert_close(ours(x, memory), theirs(x, memory, tgt_mask=later), atol=1e-12, rtol=0)


def test_checkpointing_changes_no_number_dropout_included() -> None:
    found = []
    for switch in (False, True):
        torch.manual_seed(0)
        layer = DilatedTransformerEncoderLayer(
            32, 4, *BRANCHES, dropout=0.2, attention_dropout=0.3, checkpoint_activations=switch
        )
        x = torch.randn(2, 20, 32, requires_grad=True)
        torch.manual_seed(1)
        out = layer(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_pool_the_same_bits_and_no_lease_left(dtype: torch.dtype) -> None:
    layer = DilatedTransformerEncoderLayer(32, 4, *BRANCHES).to(dtype)
    x = torch.randn(2, 37, 32, dtype=dtype, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)
    pool = TensorPool("cpu", threshold_mb=0)
    assert set_memory_pool(layer, pool) == 1
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0], expected[0])
        assert pool.stats().leases == 0
    assert pool.stats().misses > 0
    pool.close()


def test_the_switch_reaches_the_attention() -> None:
    layer = DilatedTransformerEncoderLayer(
        32, 4, *BRANCHES, enable_memory_pool=True, memory_pool_threshold_mb=2.0
    )
    info = layer.self_attn.attention.get_memory_info()
    assert (info["enabled"], info["threshold_mb"], info["leases"]) == (True, 2.0, 0)


def test_pickled_and_copied_modules_compute_the_same() -> None:
    layer = DilatedTransformerEncoderLayer(32, 4, *BRANCHES, enable_memory_pool=True)
    x = torch.randn(1, 20, 32)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


def test_compiled_module_is_one_graph_with_the_same_numbers() -> None:
    layer = DilatedTransformerEncoderLayer(32, 4, *BRANCHES)
    x = torch.randn(2, 37, 32, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected, found = layer(x, True), compiled(x, True)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    a, b = (torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, found))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
