"""`MultiheadDilatedAttention`: projections around it, with nn.MultiheadAttention's call and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from reference_modules.attention import checks
from reference_modules.attention.dilated import DilatedAttention
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.key_cache import KeyCache


class MultiheadDilatedAttention(nn.Module):
    """Batch-first multi-head dilated self-attention.

    The state_dict is that of nn.MultiheadAttention(embed_dim, num_heads).  With `num_kv_heads` there are
    fewer key and value heads than query heads, each serving num_heads / num_kv_heads of them, and
    in_proj_weight shrinks to (embed_dim + 2·num_kv_heads·head_dim, embed_dim).
    """

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        offset_rule: OffsetRule = "paper",
        detach_mixing: bool = False,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        checks.check_heads(embed_dim, num_heads, self.num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.kv_dim = self.num_kv_heads * self.head_dim
        rows = embed_dim + 2 * self.kv_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, embed_dim, device=device, dtype=dtype))
        in_proj_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.register_parameter("in_proj_bias", in_proj_bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.attention: Any = DilatedAttention(
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            offset_rule=offset_rule,
            detach_mixing=detach_mixing,
            enable_memory_pool=enable_memory_pool,
            memory_pool_threshold_mb=memory_pool_threshold_mb,
            lightweight_pool=lightweight_pool,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.MultiheadAttention does it."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        cache: KeyCache | None = None,
    ) -> tuple[Tensor, None]:
        """(b, n, embed_dim) and None: the weights are never computed as a matrix.

        With a `cache` the tokens follow those already in it, causally and without gradient.
        """
        if need_weights:
            raise ValueError("need_weights=True: the n × n weights are never formed; pass need_weights=False")
        if attn_mask is not None:
            checks.check_tensor("attn_mask", attn_mask)
            raise ValueError(
                f"attn_mask of shape {tuple(attn_mask.shape)}: segments and dilations are the mask here; "
                "pass is_causal=True for a causal one, key_padding_mask for padding, and attn_mask=None"
            )
        self._check(query, key, value)
        q_BNHD, k_BNHD, v_BNHD = self._project(query, key, value)
        if cache is None:
            out_BNHD = self.attention(q_BNHD, k_BNHD, v_BNHD, is_causal, key_padding_mask)
        else:
            out_BNHD = self._extend(q_BNHD, k_BNHD, v_BNHD, is_causal, key_padding_mask, cache)
        return self.out_proj(out_BNHD.flatten(2)), None

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, cache: KeyCache
    ) -> Tensor:
        if not is_causal or mask is not None or (self.training and self.attention.dropout):
            raise ValueError(
                f"with a cache: is_causal {is_causal}, "
                f"key_padding_mask {'none' if mask is None else 'given'}, "
                f"dropout {self.attention.dropout if self.training else 0.0}; tokens before cannot see later "
                "ones: pass is_causal=True and no mask, and call .eval()"
            )
        return cast(Tensor, self.attention.extend(q, *cache.append(k, v)))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            checks.check_features(name, x, self.embed_dim, self.in_proj_weight)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self.embed_dim, self.kv_dim, self.kv_dim]
        if query is key and key is value:  # one product instead of three
            q, k, v = torch.split(linear(query, self.in_proj_weight, self.in_proj_bias), sizes, -1)
        else:
            weights = torch.split(self.in_proj_weight, sizes)
            biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, sizes)
            q, k, v = (linear(*xwb) for xwb in zip((query, key, value), weights, biases, strict=True))
        return self._heads(q), self._for_all_heads(self._heads(k)), self._for_all_heads(self._heads(v))

    def _heads(self, x_BNE: Tensor) -> Tensor:
        return x_BNE.view(*x_BNE.shape[:2], -1, self.head_dim)

    def _for_all_heads(self, x_BNKD: Tensor) -> Tensor:
        shared = self.num_heads // self.num_kv_heads
        return x_BNKD if shared == 1 else x_BNKD.repeat_interleave(shared, dim=2)
