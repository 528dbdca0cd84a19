"""`DilatedAttention`: the function as a module without parameters, with pooled temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from reference_modules.attention import checks
from reference_modules.attention.functional import dilated_attention
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.joint import Plan
from reference_modules.attention.key_cache import attend_to_cached
from reference_modules.attention.workspace import pool_of
from reference_modules.mixin import MemoryPoolMixin


class DilatedAttention(MemoryPoolMixin, nn.Module):
    """Dilated attention over q, k, v of shape (b, n, h, d); `dilated_attention` says exactly what that is."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        dropout: float = 0.0,
        offset_rule: OffsetRule = "paper",
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
        pool: Any = None,
        scale: float | None = None,
        detach_mixing: bool = False,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        checks.check_branches(segment_lengths, dilation_rates)
        checks.check_options(scale, offset_rule, dropout, kernel)
        self.segment_lengths = tuple(int(w) for w in segment_lengths)
        self.dilation_rates = tuple(int(r) for r in dilation_rates)
        self.dropout = dropout
        self.offset_rule = offset_rule
        self.scale = scale
        self.detach_mixing = detach_mixing
        self.kernel = kernel
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb, lightweight_pool, pool)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """(b, n, h, d); `key_padding_mask` is (b, n), True = ignore. Dropout only in training mode."""
        out = dilated_attention(
            q,
            k,
            v,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            is_causal=is_causal,
            scale=self.scale,
            offset_rule=self.offset_rule,
            detach_mixing=self.detach_mixing,
            dropout_p=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            pool=pool_of(self),
            kernel=self.kernel,
        )
        return cast(Tensor, out)

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last q.shape[1] rows of causal attention over all of k and v, without gradient or dropout."""
        checks.check_extension(q, k, v)
        scale = q.shape[3] ** -0.5 if self.scale is None else float(self.scale)
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        plan = Plan.of(pairs, q.shape[2], self.offset_rule, True, scale, kernel=self.kernel)
        return attend_to_cached(q, k, v, plan, pool_of(self))

    def extra_repr(self) -> str:
        return (
            f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}, "
            f"dropout={self.dropout}, offset_rule={self.offset_rule!r}"
        )
