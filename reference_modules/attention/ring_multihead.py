"""`RingMultiheadDilatedAttention`: the projections of multi-head attention around a ring of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from reference_modules.attention.agreement import agree
from reference_modules.attention.exchange import Peers
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.key_cache import KeyCache
from reference_modules.attention.multihead import MultiheadDilatedAttention
from reference_modules.attention.placement import Placement
from reference_modules.attention.ring import DistributedDilatedAttention, RingDilatedAttention


class RingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """MultiheadDilatedAttention on this rank's part of the sequence, with the same call and weights.

    `gather=True` fetches usable rows where they are few, as DistributedDilatedAttention does; else all keys
    travel around the ring.  Every rank gets its part of each parameter's gradient: `reduce_gradients` adds
    them up after the backward.  (DistributedDataParallel would divide by the number of ranks: right for a
    loss that is the mean over all ranks' tokens.)
    """

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
        process_group: dist.ProcessGroup | None = None,
        placement: Placement = "contiguous",
        gather: bool = False,
        timeout: timedelta | None = None,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            num_kv_heads=num_kv_heads,
            dropout=dropout,
            bias=bias,
            offset_rule=offset_rule,
            device=device,
            dtype=dtype,
        )
        kind = DistributedDilatedAttention if gather else RingDilatedAttention
        self.attention = kind(
            segment_lengths,
            dilation_rates,
            process_group=process_group,
            placement=placement,
            dropout=dropout,
            offset_rule=offset_rule,
            timeout=timeout,
            enable_memory_pool=enable_memory_pool,
            memory_pool_threshold_mb=memory_pool_threshold_mb,
            lightweight_pool=lightweight_pool,
        )

    def _extend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, cache: KeyCache
    ) -> Tensor:
        raise ValueError(
            f"a cache of {cache.tokens} tokens was given; no rank holds the whole past, so generate on one "
            "device: MultiheadDilatedAttention takes the same state_dict"
        )

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """On all ranks at once: one that raised alone would leave the others waiting until the timeout."""
        peers = Peers.of(self.attention.process_group, self.attention.timeout)
        if peers is None:
            super()._check(query, key, value)
            return
        heads = f"{self.num_heads} heads, {self.num_kv_heads} of keys"
        agree(
            peers, query, heads, lambda: super(RingMultiheadDilatedAttention, self)._check(query, key, value)
        )
