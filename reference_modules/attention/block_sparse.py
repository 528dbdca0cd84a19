"""`BlockSparseRingDilatedAttention`: dilated attention within chosen blocks, on one device or on many."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from reference_modules.attention import checks
from reference_modules.attention.block_work import BlockWork
from reference_modules.attention.exchange import Peers
from reference_modules.attention.geometry import OffsetRule
from reference_modules.attention.patterns import BlockPattern, PatternCache, shared_pattern_cache
from reference_modules.attention.placement import Placement, chunks_of
from reference_modules.attention.ring import RingDilatedAttention
from reference_modules.attention.ring_pass import Ring
from reference_modules.attention.sharded import Job


class BlockSparseRingDilatedAttention(RingDilatedAttention):
    """A query sees a key if a dilated branch allows the pair and the key's block is chosen for the query's.

    The softmax is exact over these pairs, weighted by the number of branches that allow them.  On one
    device any number of tokens will do; over ranks every chunk must hold whole blocks.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        pattern: BlockPattern | None = None,
        use_pattern_cache: bool = True,
        pattern_cache: PatternCache | None = None,
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
    ) -> None:
        super().__init__(
            segment_lengths,
            dilation_rates,
            process_group=process_group,
            placement=placement,
            dropout=dropout,
            offset_rule=offset_rule,
            scale=scale,
            timeout=timeout,
            enable_memory_pool=enable_memory_pool,
            memory_pool_threshold_mb=memory_pool_threshold_mb,
            lightweight_pool=lightweight_pool,
            pool=pool,
        )
        for name, value, kind in (
            ("pattern", pattern, BlockPattern),
            ("pattern_cache", pattern_cache, PatternCache),
        ):
            if value is not None and not isinstance(value, kind):
                raise ValueError(
                    f"{name} is {value!r}; it must be a {kind.__name__}, or None for the usual one"
                )
        self.pattern = BlockPattern() if pattern is None else pattern
        self.use_pattern_cache = use_pattern_cache
        self._pattern_cache = pattern_cache

    @property
    def pattern_cache(self) -> PatternCache | None:
        """Its own, else the one all modules share; None where switched off."""
        if not self.use_pattern_cache:
            return None
        return shared_pattern_cache() if self._pattern_cache is None else self._pattern_cache

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """This rank's part of the output, (b, n, h, d) as its q, k and v; masks and dropout as in the ring.

        Dropout falls on the probability of each pair, however many branches allow it.
        """
        peers = Peers.of(self.process_group, self.timeout)
        if peers is None:
            peers = Peers.nobody()
            checks.check_switch("is_causal", is_causal)
            checks.check_qkv(q, k, v)
            checks.check_key_padding_mask(key_padding_mask, q)
        else:
            self._agree(peers, q, k, v, is_causal, key_padding_mask)
        tokens, size = q.shape[1], self.pattern.block_size
        if tokens == 0:
            return q * k * v
        whole = tokens * peers.ranks
        if over := -tokens % size:
            q, k, v = (pad(x, (0, 0, 0, 0, 0, over)) for x in (q, k, v))
            key_padding_mask = (
                None if key_padding_mask is None else pad(key_padding_mask, (0, over), value=True)
            )
        plan = self._plan(q, is_causal)
        ring = Ring(peers, self.placement if peers.ranks > 1 else "contiguous", q.shape[1])
        content = (
            self._choose(ring, q, k, whole, is_causal, key_padding_mask) if self.pattern.content else None
        )
        work = BlockWork(plan, self.pattern, whole, self.pattern_cache, content)
        return self._run(Job(ring, work), q, k, v, key_padding_mask)[:, :tokens]

    @torch.no_grad()
    def _choose(
        self, ring: Ring, q: Tensor, k: Tensor, whole: int, is_causal: bool, mask: Tensor | None
    ) -> Tensor:
        """A key block stands as the mean of its visible keys, a query block too, but causally as its first.

        With a mean there, a token would change what earlier ones of its block see.
        """
        size, everyone = self.pattern.block_size, ring.peers.ranks
        if mask is not None:
            k = k.masked_fill(mask[:, :, None, None], 0.0)
        q_BQTHD, k_BQTHD = (x.unflatten(1, (-1, size)) for x in (q, k))  # type: ignore[no-untyped-call]
        queries = q_BQTHD[:, :, 0] if is_causal else q_BQTHD.mean(2)
        numbers = [_blocks(ring, rank, size, q.device) for rank in range(everyone)]
        gathered = ring.peers.gather(k_BQTHD.sum(2).contiguous(), "gathering the blocks' mean keys")
        order = torch.cat(numbers).argsort()
        held = (
            (whole - order.sort().values * size).clamp(max=size).unsqueeze(0)
        )  # the last block may be padded
        if mask is not None:
            visible = (~mask).unflatten(1, (-1, size)).sum(2)  # type: ignore[no-untyped-call]
            held = torch.cat(ring.peers.gather(visible, "counting the blocks' visible keys"), 1)[:, order]
        keys = torch.cat(gathered, 1)[:, order] / held.clamp_min(1)[:, :, None, None]
        return self.pattern.chosen_by_content(
            queries.transpose(1, 2),
            numbers[ring.peers.rank],
            keys.transpose(1, 2),
            is_causal,
            empty_BK=held == 0,
        )

    def _check(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None) -> None:
        super()._check(q, k, v, is_causal, mask)
        size = self.pattern.block_size
        if any(chunk.length % size for chunk in chunks_of(0, 2, q.shape[1], self.placement)):
            pieces = 2 if self.placement == "zigzag" else 1
            raise ValueError(
                f"this rank holds {q.shape[1]} tokens, not {pieces} times whole blocks of {size}; "
                f"pad them to a multiple of {pieces * size}, or choose a block_size that divides them"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pattern={self.pattern}"


def _blocks(ring: Ring, rank: int, size: int, device: torch.device) -> Tensor:
    held = ring.held_by(rank)
    return torch.cat([torch.arange(c.start // size, c.stop // size, device=device) for c in held])
