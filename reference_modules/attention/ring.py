"""`RingDilatedAttention`, `DistributedDilatedAttention`: a sequence over ranks, the numbers of one device."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
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
        dropout: float = 0.0,
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
        checks.check_options(scale, offset_rule, dropout, kernel)
        check_placement(placement)
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
            raise ValueError(
                f"timeout is {timeout!r}; it must be a positive timedelta, as timedelta(seconds=60), or None"
            )
        self.segment_lengths = tuple(int(w) for w in segment_lengths)
        self.dilation_rates = tuple(int(r) for r in dilation_rates)
        self.process_group = process_group
        self.placement: Placement = placement
        self.dropout = dropout
        self.offset_rule = offset_rule
        self.scale = scale
        self.timeout = timeout
        self.kernel = kernel
        self._init_memory_pool(enable_memory_pool, memory_pool_threshold_mb, lightweight_pool, pool)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """This rank's part of the output, (b, n, h, d) as its q, k and v.

        `key_padding_mask` is (b, n) for this rank's keys, True = ignore; all ranks give one or none does.
        Dropout falls only in training mode, other draws on every rank.
        """
        peers = Peers.of(self.process_group, self.timeout)
        if peers is None:
            return self._alone(q, k, v, is_causal, key_padding_mask)
        self._agree(peers, q, k, v, is_causal, key_padding_mask)
        ring, plan = Ring(peers, self.placement, q.shape[1]), self._plan(q, is_causal)
        return self._run(Job.of(ring, plan, q, self.gather_at_most), q, k, v, key_padding_mask)

    def _alone(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_padding_mask: Tensor | None
    ) -> Tensor:
        out = dilated_attention(
            q,
            k,
            v,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            is_causal=is_causal,
            scale=self.scale,
            offset_rule=self.offset_rule,
            dropout_p=self._dropout_p,
            key_padding_mask=key_padding_mask,
            pool=pool_of(self),
            kernel=self.kernel,
        )
        return cast(Tensor, out)

    def _agree(
        self, peers: Peers, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None
    ) -> None:
        """One error on all ranks, before anything travels."""
        settings = (
            f"is_causal={is_causal}, key_padding_mask={'none' if mask is None else 'given'}, "
            f"dropout_p={self._dropout_p}, {self.extra_repr()}"
        )
        agree(peers, q, settings, lambda: self._check(q, k, v, is_causal, mask))

    def _plan(self, q: Tensor, is_causal: bool) -> Plan:
        scale = q.shape[3] ** -0.5 if self.scale is None else float(self.scale)
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        dropout, kernel = self._dropout_p, self.kernel
        return Plan.of(pairs, q.shape[2], self.offset_rule, is_causal, scale, dropout, kernel=kernel)

    def _run(self, job: Job, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        everyones = None if mask is None else _everyones_mask(job.ring.peers, mask)
        seed = torch.randint(1 << 62, ()) if self._dropout_p else None
        out, _ = ShardedAttention.apply(q, k, v, everyones, seed, job, pool_of(self))  # type: ignore[no-untyped-call]
        return cast(Tensor, out)

    @property
    def _dropout_p(self) -> float:
        return float(self.dropout) if self.training else 0.0

    def _check(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> None:
        checks.check_switch("is_causal", is_causal)
        checks.check_qkv(q, k, v)
        checks.check_key_padding_mask(mask, q)
        check_tokens(q.shape[1], self.placement)

    def extra_repr(self) -> str:
        return (
            f"segment_lengths={list(self.segment_lengths)}, dilation_rates={list(self.dilation_rates)}, "
            f"placement={self.placement!r}, dropout={self.dropout}, offset_rule={self.offset_rule!r}, "
            f"scale={self.scale}"
        )


class DistributedDilatedAttention(RingDilatedAttention):
    """The same, but a branch gathers the rows its heads can use where those are few enough.

    Of a branch with dilation r only one row in r is of use to a head.  Where these rows, from all ranks
    that share a segment, take at most `gather_at_most` times a rank's own keys, they are fetched at once
    and kept for the step.
    """

    gather_at_most = 2.0


def _everyones_mask(peers: Peers, mask_BN: Tensor) -> Tensor:
    """(ranks, b, n): a byte a token, so all ranks' masks are fetched at once."""
    found = peers.gather(mask_BN.to(torch.uint8).contiguous(), "gathering key padding masks")
    return torch.stack(found).bool()
