from __future__ import annotations

import logging
from collections import deque
from typing import Deque, List

from .blocks import BlockPool, CrossCache
from .sequence import Sequence, Status

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, pool: BlockPool, cross: CrossCache, max_running: int, lookahead: int) -> None:
        self.pool = pool
        self.cross = cross
        self.max_running = max_running
        self.lookahead = lookahead
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _try_admit(self, seq: Sequence) -> bool:
        hit = self.pool.lookup(seq.block_hashes(self.pool.block_size))  # clean: near miss, released where the rest does not fit, otherwise part of the sequence
        fresh = self.pool.allocate(seq.blocks_needed(self.pool.block_size) - len(hit))  # leak: without an encoder slot only the cached prefix is released
        if fresh is None:
            self.pool.release(hit)
            return False
        if seq.has_image:
            ok, slot = self.cross.enlist()  # clean: near miss, kept in the sequence, freed with its blocks
            if not ok:
                self.pool.release(hit)
                return False
            seq.encoder_slot = slot
        seq.blocks = hit + fresh
        seq.status = Status.RUNNING
        return True

    def schedule(self) -> List[Sequence]:
        while self.waiting and len(self.running) < self.max_running:
            if not self._try_admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            if seq not in self.running:
                continue
            while not self._grow(seq):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is seq:
                    break
        return list(self.running)

    def _grow(self, seq: Sequence) -> bool:
        missing = seq.blocks_needed(self.pool.block_size) + 1 - len(seq.blocks)
        if missing <= 0:
            return True
        more = self.pool.allocate(missing)  # clean: near miss, None holds nothing, otherwise appended to the sequence
        if more is None:
            return False
        seq.blocks.extend(more)
        return True

    def reserve_draft(self, seq: Sequence) -> bool:
        if seq.draft_blocks:
            return True
        blocks = self.pool.allocate(self.lookahead)  # leak: finish and preempt release the draft blocks, abort does not
        if blocks is None:
            return False
        seq.draft_blocks = blocks
        return True

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
        if seq.encoder_slot is not None:
            self.cross.delist(seq.encoder_slot)
            seq.encoder_slot = None

    def _free_draft(self, seq: Sequence) -> None:
        self.pool.release(seq.draft_blocks)
        seq.draft_blocks = []

    def preempt(self, seq: Sequence) -> None:
        logger.debug("preempting %s", seq.ident)
        self.running.remove(seq)
        self._free_draft(seq)
        self._free(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    def finish(self, seq: Sequence) -> None:
        for i, h in enumerate(seq.block_hashes(self.pool.block_size)):
            self.pool.publish(seq.blocks[i], h)
        self.running.remove(seq)
        self._free_draft(seq)
        self._free(seq)
        seq.status = Status.FINISHED

    def abort(self, ident: str) -> bool:
        for seq in self.running:
            if seq.ident == ident:
                self.running.remove(seq)
                self._free(seq)
                seq.status = Status.FINISHED
                return True
        for seq in self.waiting:
            if seq.ident == ident:
                self.waiting.remove(seq)
                return True
        return False
