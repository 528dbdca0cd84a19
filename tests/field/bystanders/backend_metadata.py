"""Builds attention metadata per step; index tensors come from a pool."""
from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Callable, List, Optional

import torch

logger = logging.getLogger(__name__)


class IndexPool:
    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self._free: List[torch.Tensor] = []
        self.created = 0

    def obtain_index(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        self.created += 1
        return torch.zeros(self.max_len, dtype=torch.int32)

    def recycle_index(self, t: torch.Tensor) -> None:
        self._free.append(t)


@dataclass(eq=False)
class DecodeMetadata:
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Optional[torch.Tensor] = None
    num_tokens: int = 0

    def release(self, pool: IndexPool) -> None:
        pool.recycle_index(self.slot_mapping)
        pool.recycle_index(self.seq_lens)
        if self.block_tables is not None:
            pool.recycle_index(self.block_tables)
            self.block_tables = None


@dataclass(eq=False)
class ChunkMetadata:
    starts: torch.Tensor
    ends: torch.Tensor

    def release(self, pool: IndexPool) -> None:
        pool.recycle_index(self.starts)


class StepContext:
    """Frees its scratch index when collected."""

    def __init__(self, pool: IndexPool) -> None:
        self.scratch = pool.obtain_index()  # clean: near miss, the finalizer recycles it
        self._fin = weakref.finalize(self, pool.recycle_index, self.scratch)

    def close(self) -> None:
        self._fin()


class MetadataBuilder:
    def __init__(self, pool: IndexPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._deferred: List[Callable[[], None]] = []

    def build_decode(self, slots: List[int], lens: List[int], tables: Optional[List[int]] = None) -> DecodeMetadata:
        sm = self.pool.obtain_index()  # clean: part of the metadata returned, whose release recycles it
        sl = self.pool.obtain_index()  # clean: part of the metadata returned
        sm[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
        sl[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        meta = DecodeMetadata(sm, sl, num_tokens=len(slots))
        if tables:
            meta.block_tables = self.pool.obtain_index()  # clean: release recycles it when it is set
            meta.block_tables[: len(tables)] = torch.tensor(tables, dtype=torch.int32)
        return meta

    def build_chunk(self, spans: List[tuple]) -> ChunkMetadata:
        starts = self.pool.obtain_index()  # clean: released with the metadata
        ends = self.pool.obtain_index()  # leak: ChunkMetadata.release forgets this field
        for i, (s, e) in enumerate(spans):
            starts[i], ends[i] = s, e
        return ChunkMetadata(starts, ends)

    def run_decode(self, model, slots: List[int], lens: List[int]) -> torch.Tensor:
        meta = self.build_decode(slots, lens)  # clean: released after the call
        out = model(meta)
        meta.release(self.pool)
        return out

    def run_decode_padded(self, model, slots: List[int], lens: List[int], size: int) -> Optional[torch.Tensor]:
        meta = self.build_decode(slots, lens)  # leak: too many tokens for the padded size returns before the release
        if meta.num_tokens > size:
            logger.debug("%d tokens do not fit %d", meta.num_tokens, size)
            return None
        out = model(meta)[: meta.num_tokens]
        meta.release(self.pool)
        return out

    def run_deferred(self, model, slots: List[int], lens: List[int]) -> torch.Tensor:
        meta = self.build_decode(slots, lens)  # clean: near miss, a closure in _deferred releases it at flush
        self._deferred.append(lambda: meta.release(self.pool))
        return model(meta)

    def flush(self) -> None:
        for fn in self._deferred:
            fn()
        self._deferred.clear()

    def cumulative(self, lens: List[int]) -> torch.Tensor:
        idx = self.pool.obtain_index()  # leak: cumsum gives a new tensor under the same name
        idx[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        idx = idx[: len(lens)].cumsum(0)
        return idx

    def max_len(self, lens: List[int]) -> int:
        idx = self.pool.obtain_index()  # clean: near miss, the view is another name and idx is recycled
        view = idx[: len(lens)]
        view.copy_(torch.tensor(lens, dtype=torch.int32))
        longest = int(view.max())
        self.pool.recycle_index(idx)
        return longest

    def scratch_sum(self, lens: List[int]) -> int:
        ctx = StepContext(self.pool)  # clean: close runs the finalizer
        ctx.scratch[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        total = int(ctx.scratch[: len(lens)].sum())
        ctx.close()
        return total
