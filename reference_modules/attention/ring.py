"""`RingDilatedAttention`, `DistributedDilatedAttention`: a sequence over ranks, the numbers of one device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from reference_modules.attention import checks
from reference_modules.attention.agreement import agree
from reference_modules.attention.exchange import Peers
from reference_modules.attention.functional import dilated_attention
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.joint import Plan
from reference_modules.attention.placement import Placement, check_placement, check_tokens
from reference_modules.attention.ring_pass import Ring
from reference_modules.attention.sharded import Job, ShardedAttention
from reference_modules.attention.workspace import pool_of
from reference_modules.mixin import MemoryPoolMixin


class RingDilatedAttention(MemoryPoolMixin, nn.Module):
    """Dilated attention whose keys travel around a ring of ranks.

    Every rank of the group calls it with its own part of the sequence, all parts equally long; `placement`
    says which tokens those are (see placement.shard).  Without a process group, or in a group of one, it is
    DilatedAttention. A rank that dies, or comes with another shape, ends in an error on all ranks within
    `timeout` (None: the group's).
    """

    gather_at_most = 0.0  # gathered keys as a multiple of a rank's own; 0: all travel around the ring

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        process_group: dist.ProcessGroup | None = None,
        placement: Placement = "contiguous",
        offset_rule: OffsetRule = "paper",
        scale: float | None = None,
        timeout: timedelta | None = None,
        enable_memory_pool: bool = False,
        memory_pool_threshold_mb: float | None = None,
        lightweight_pool: bool = True,
        pool: Any = None,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        checks.check_branches(segment_lengths, dilation_rates)
        checks.check_options(scale, offset_rule, 0.0, kernel)
        check_placement(placement)
        self.segment_lengths = tuple(segment_lengths)
        self.dilation_rates = tuple(dilation_rates)
        self.process_group = process_group
        self.placement: Placement = placement
        self.offset_rule = offset_rule
        self.scale = scale
        self.timeout = timeout
        self.kernel = kernel
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb, lightweight_pool, pool)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """This rank's part of the output, (b, n, h, d) as its q, k and v."""
        peers = Peers.of(self.process_group, self.timeout)
        if peers is None:
            return self._alone(q, k, v, is_causal)
        agree(peers, q, self._settings(is_causal), lambda: self._check(q, k, v))
        scale = q.shape[3] ** -0.5 if self.scale is None else float(self.scale)
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        plan = Plan.of(pairs, q.shape[2], self.offset_rule, is_causal, scale, kernel=self.kernel)
        ring = Ring(peers, self.placement, q.shape[1])
        job = Job.of(ring, plan, q, self.gather_at_most)
        out, _ = ShardedAttention.apply(q, k, v, job, pool_of(self))  # type: ignore[no-untyped-call]
        return cast(Tensor, out)

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        out = dilated_attention(
            q,
            k,
            v,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            is_causal=is_causal,
            scale=self.scale,
            offset_rule=self.offset_rule,
            pool=pool_of(self),
            kernel=self.kernel,
        )
        return cast(Tensor, out)

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        checks.check_qkv(q, k, v)
        check_tokens(q.shape[1], self.placement)

    def _settings(self, is_causal: bool) -> str:
        return f"is_causal={is_causal}, {self.extra_repr()}"

    def extra_repr(self) -> str:
        return (
            f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}, "
            f"placement={self.placement!r}, offset_rule={self.offset_rule!r}, scale={self.scale}"
        )


class DistributedDilatedAttention(RingDilatedAttention):
    """The same, but a branch gathers the rows its heads can use where those are few enough.

    Of a branch with dilation r only one row in r is of use to a head.  Where these rows, from all ranks
    that share a segment, take at most `gather_at_most` times a rank's own keys, they are fetched at once
    and kept for the step.
    """

    gather_at_most = 2.0
