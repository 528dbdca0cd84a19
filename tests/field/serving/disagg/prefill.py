from __future__ import annotations

import logging
import queue
from typing import Dict, List, Optional, Tuple

import torch

from .pages import PageGroup, PagePool, PoolExhausted

logger = logging.getLogger(__name__)

Handoff = Tuple[str, PageGroup]


class PrefillWorker:
    def __init__(self, pool: PagePool, out: "queue.Queue[Handoff]") -> None:
        self.pool = pool
        self.out = out
        self.partial: Dict[str, List[PageGroup]] = {}

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.pool.page_size)

    def _compute(self, hidden: torch.Tensor) -> PageGroup:
        group = self.pool.alloc_pages(self._pages_for(hidden.shape[0]))  # clean: returned to the caller
        for page_id, rows in zip(group.ids, hidden.split(self.pool.page_size)):
            self.pool.storage[page_id, : rows.shape[0]].copy_(rows)
        group.tokens = hidden.shape[0]
        return group

    def prefill(self, rid: str, hidden: torch.Tensor) -> bool:
        try:
            group = self._compute(hidden)  # clean: put on the queue for the decode side
        except PoolExhausted:
            return False
        self.out.put((rid, group))
        return True

    def prefill_nowait(self, rid: str, hidden: torch.Tensor) -> bool:
        group = self._compute(hidden)  # leak: a full queue is logged and the pages are forgotten
        try:
            self.out.put_nowait((rid, group))
        except queue.Full:
            logger.warning("decode side is behind, %s has to wait", rid)
            return False
        return True

    def prefill_or_undo(self, rid: str, hidden: torch.Tensor) -> bool:
        group = self._compute(hidden)  # clean: near miss, deallocated when the queue is full
        try:
            self.out.put_nowait((rid, group))
        except queue.Full:
            self.pool.dealloc_pages(group)
            return False
        return True

    def prefill_chunk(self, rid: str, hidden: torch.Tensor, last: bool) -> None:
        group = self._compute(hidden)  # clean: collected per request, sent with the last chunk or aborted
        self.partial.setdefault(rid, []).append(group)
        if last:
            ids: List[int] = []
            for g in self.partial.pop(rid):
                ids.extend(g.ids)
            self.out.put((rid, PageGroup(ids)))

    def abort(self, rid: str) -> None:
        for g in self.partial.pop(rid, []):
            self.pool.dealloc_pages(g)

    def embed_only(self, hidden: torch.Tensor) -> Optional[torch.Tensor]:
        group = self._compute(hidden)  # leak: the mean is returned and the pages stay allocated
        if not group.ids:
            return None
        return self.pool.storage[group.ids].mean(dim=(0, 1))

    def profile(self, hidden: torch.Tensor, rounds: int) -> int:
        total = 0
        for _ in range(rounds):
            g = self._compute(hidden)  # clean: deallocated each round
            total += len(g)
            self.pool.dealloc_pages(g)
        return total
