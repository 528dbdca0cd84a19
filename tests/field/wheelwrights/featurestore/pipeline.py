from __future__ import annotations

import logging
from typing import Iterable, Iterator

import torch

from .batcher import Batcher
from .pool import Block, BlockPool
from .transforms import Transform, apply_all, column_stats

log = logging.getLogger(__name__)


class Pipeline:
    def __init__(self, pool: BlockPool, transforms: list[Transform]) -> None:
        self.pool = pool
        self.transforms = transforms
        self.dropped = 0

    def _prepare(self, rows: torch.Tensor) -> Block | None:
        block = self.pool.fetch_block()  # clean: near miss, apply_all disposes of it or passes it through
        if block is None:
            return None
        block.rows = rows.shape[0]
        block.data[: block.rows].copy_(rows)
        return apply_all(block, self.transforms, self.pool)  # clean: the block is the caller's

    def one(self, rows: torch.Tensor) -> torch.Tensor | None:
        out = self._prepare(rows)  # clean: returned to the pool after the clone
        if out is None:
            self.dropped += 1
            return None
        res = out.data[: out.rows].clone()
        self.pool.return_block(out)
        return res

    def stream(self, source: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for rows in source:
            out = self._prepare(rows)  # leak: continue on an empty result skips return_block
            if out is None:
                continue
            if out.rows == 0:
                self.dropped += 1
                continue
            try:
                yield out.data[: out.rows]
            finally:
                self.pool.return_block(out)

    def profile(self, source: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stats = []
        for rows in source:
            block = self.pool.fetch_block()  # leak: break for want of a second block keeps this one
            if block is None:
                break
            block.rows = rows.shape[0]
            block.data[: block.rows].copy_(rows)
            st = column_stats(block, self.pool)
            if st is None:
                log.info("profile cut short after %d", len(stats))
                break
            stats.append(st)
            self.pool.return_block(block)
        return stats

    def drain(self, batcher: Batcher) -> list[torch.Tensor]:
        outs = []
        try:
            while (nxt := batcher.next_full()) is not None:
                table, block = nxt
                outs.append(block.data[: block.rows].clone())
                self.pool.return_block(block)
        finally:
            batcher.clear()
        return outs
