"""Transformer layers whose self-attention is dilated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import gelu, relu
from torch.utils.checkpoint import checkpoint

from reference_modules.attention import checks
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.key_cache import KeyCache
from reference_modules.attention.multihead import MultiheadDilatedAttention

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "relu": relu}


class _Layer(nn.Module):
    """What encoder and decoder layers share: dilated self-attention, the feed-forward part, checkpointing."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        num_kv_heads: int | None = None,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation: str = "gelu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = True,
        bias: bool = True,
        offset_rule: OffsetRule = "paper",
        checkpoint_activations: bool = False,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
    ) -> None:
        super().__init__()
        checks.check_choice("activation", activation, list(_ACTIVATIONS))
        checks.check_probability("dropout", dropout)
        if dim_feedforward is not None:
            checks.check_whole("dim_feedforward", dim_feedforward, 1, ", or None for four times d_model")
        self.self_attn = MultiheadDilatedAttention(
            d_model,
            nhead,
            segment_lengths,
            dilation_rates,
            num_kv_heads=num_kv_heads,
            dropout=attention_dropout,
            bias=bias,
            offset_rule=offset_rule,
            enable_memory_pool=enable_memory_pool,
            memory_pool_threshold_mb=memory_pool_threshold_mb,
            lightweight_pool=lightweight_pool,
        )
        hidden = 4 * d_model if dim_feedforward is None else dim_feedforward
        self.linear1 = nn.Linear(d_model, hidden, bias)
        self.linear2 = nn.Linear(hidden, d_model, bias)
        self.norm1 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.norm2 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation = _ACTIVATIONS[activation]
        self.norm_first = norm_first
        self.checkpoint_activations = checkpoint_activations

    def _add(self, x: Tensor, norm: nn.LayerNorm, part: Callable[[Tensor], Tensor]) -> Tensor:
        """One residual step, the norm before the part or after the sum."""
        if self.norm_first:
            return x + cast(Tensor, self.dropout(part(norm(x))))
        return cast(Tensor, norm(x + self.dropout(part(x))))

    def _attend(
        self, x: Tensor, is_causal: bool, key_padding_mask: Tensor | None, cache: KeyCache | None = None
    ) -> Tensor:
        found = self.self_attn(x, x, x, is_causal=is_causal, key_padding_mask=key_padding_mask, cache=cache)
        return cast(Tensor, found[0])

    def _feed_forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _run(self, body: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """With checkpointing only inputs are kept and the body runs again in the backward, same dropout."""
        if self.checkpoint_activations and self.training:
            return cast(Tensor, checkpoint(body, *inputs, use_reentrant=False))
        return body(*inputs)


class DilatedTransformerEncoderLayer(_Layer):
    """Dilated self-attention and a feed-forward part, (b, n, d_model) in and out."""

    def forward(
        self,
        src: Tensor,
        is_causal: bool = False,
        src_key_padding_mask: Tensor | None = None,
        cache: KeyCache | None = None,
    ) -> Tensor:
        """`src_key_padding_mask` is (b, n), True = ignore; with a `cache` src follows the tokens in it."""
        return self._run(self._body, src, is_causal, src_key_padding_mask, cache)

    def _body(self, x: Tensor, is_causal: bool, mask: Tensor | None, cache: KeyCache | None) -> Tensor:
        x = self._add(x, self.norm1, lambda y: self._attend(y, is_causal, mask, cache))
        return self._add(x, self.norm2, self._feed_forward)


class DilatedTransformerDecoderLayer(_Layer):
    """Causal dilated self-attention, dense attention to an encoder's memory, and a feed-forward part.

    Memory may have any length; segments and dilations pair equal positions, so they say nothing about it.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        attention_dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        bias: bool = True,
        enable_memory_pool: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            segment_lengths,
            dilation_rates,
            attention_dropout=attention_dropout,
            layer_norm_eps=layer_norm_eps,
            bias=bias,
            enable_memory_pool=enable_memory_pool,
            **options,
        )
        self.multihead_attn = nn.MultiheadAttention(
            d_model, nhead, attention_dropout, bias=bias, batch_first=True
        )
        self.norm3 = nn.LayerNorm(d_model, layer_norm_eps, bias=bias)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        is_causal: bool = True,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """tgt (b, n, d_model), memory (b, m, d_model); the masks are (b, n) and (b, m), True = ignore."""
        return self._run(self._body, tgt, memory, is_causal, tgt_key_padding_mask, memory_key_padding_mask)

    def _body(
        self, x: Tensor, memory: Tensor, is_causal: bool, mask: Tensor | None, memory_mask: Tensor | None
    ) -> Tensor:
        x = self._add(x, self.norm1, lambda y: self._attend(y, is_causal, mask))
        x = self._add(x, self.norm3, lambda y: self._look_at(y, memory, memory_mask))
        return self._add(x, self.norm2, self._feed_forward)

    def _look_at(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        weight = self.self_attn.in_proj_weight
        checks.check_features("memory", memory, x.shape[-1], weight)
        if memory.shape[0] != x.shape[0]:
            raise ValueError(
                f"memory has a batch of {memory.shape[0]} and tgt one of {x.shape[0]}; they must be equal: "
                "use memory.expand or repeat_interleave"
            )
        checks.check_key_padding_mask(mask, memory, "memory_key_padding_mask")
        found = self.multihead_attn(x, memory, memory, key_padding_mask=mask, need_weights=False)
        return cast(Tensor, found[0])
