"""Paged KV bookkeeping for the decode scheduler."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

logger = logging.getLogger(__name__)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    priority: int = 0
    block_ids: list[int] = field(default_factory=list)
    aborted: bool = False


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block_id = self._free.popleft()
        self._used.add(block_id)
        return block_id

    def free(self, block_id: int) -> None:
        self._used.remove(block_id)
        self._free.append(block_id)

    def free_many(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.free(block_id)


class BlockManager:
    def __init__(self, pool: BlockPool, watermark: int = 2) -> None:
        self.pool = pool
        self.watermark = watermark
        self._tables: dict[int, list[int]] = {}

    def _blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def can_admit(self, seq: Sequence) -> bool:
        return self.pool.num_free - self._blocks_needed(seq.num_tokens) >= self.watermark

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self._tables:
            return True
        got: list[int] = []
        for _ in range(self._blocks_needed(seq.num_tokens)):
            block_id = self.pool.allocate()  # clean: near miss, the partial list is rolled back when the pool is exhausted
            if block_id is None:
                self.pool.free_many(got)
                return False
            got.append(block_id)
        self._tables[seq.seq_id] = got
        return True

    def admit_chunk(self, seq: Sequence, chunk_tokens: int) -> bool:
        fresh: list[int] = []
        for _ in range(self._blocks_needed(chunk_tokens)):
            block_id = self.pool.allocate()  # leak: blocks already in fresh are dropped when a later one is None
            if block_id is None:
                logger.debug("chunk of seq %d postponed", seq.seq_id)
                return False
            fresh.append(block_id)
        self._tables.setdefault(seq.seq_id, []).extend(fresh)
        return True

    def append_slot(self, seq: Sequence) -> bool:
        if seq.num_tokens % self.pool.block_size != 0:
            return True
        block_id = self.pool.allocate()  # clean: appended to the table that release() empties
        if block_id is None:
            return False
        self._tables[seq.seq_id].append(block_id)
        return True

    def copy_on_write(self, seq: Sequence, logical: int, shared: set[int]) -> Optional[tuple[int, int]]:
        table = self._tables[seq.seq_id]
        src = table[logical]
        dst = self.pool.allocate()  # leak: not returned when the source block turns out to be exclusive
        if dst is None:
            return None
        if src not in shared:
            return None
        table[logical] = dst
        shared.discard(src)
        return src, dst

    def reserve_lookahead(self, seq: Sequence, k: int) -> list[int]:
        extra = []
        while len(extra) < k:
            block_id = self.pool.allocate()  # clean: handed to the caller in a list
            if block_id is None:
                break
            extra.append(block_id)
        return extra

    def release(self, seq: Sequence) -> None:
        self.pool.free_many(self._tables.pop(seq.seq_id, []))


class Scheduler:
    def __init__(self, manager: BlockManager, lookahead: int) -> None:
        self.manager = manager
        self.lookahead = lookahead
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def step_speculative(self, seq: Sequence) -> int:
        extra = self.manager.reserve_lookahead(seq, self.lookahead)  # leak: early return for an aborted sequence keeps the lookahead blocks
        if seq.aborted:
            return 0
        accepted = min(len(extra), seq.num_tokens % self.lookahead)
        self.manager.pool.free_many(extra)
        return accepted

    def probe_capacity(self, seq: Sequence) -> bool:
        extra = self.manager.reserve_lookahead(seq, self.lookahead)  # clean: near miss, a short list is still given back before the answer
        enough = len(extra) == self.lookahead
        self.manager.pool.free_many(extra)
        return enough

    def keep_accepted(self, seq: Sequence, accepted: int) -> None:
        extra = self.manager.reserve_lookahead(seq, self.lookahead)  # clean: near miss, head moves into the request, tail is freed
        seq.block_ids.extend(extra[:accepted])
        self.manager.pool.free_many(extra[accepted:])

    def finish(self, seq: Sequence) -> None:
        self.manager.pool.free_many(seq.block_ids)
        seq.block_ids.clear()
        self.manager.release(seq)
        self.running.remove(seq)

    def warm(self, seq: Sequence) -> None:
        extra = self.manager.reserve_lookahead(seq, self.lookahead)  # leak: only the first block of the list is freed
        if extra:
            logger.info("warm-up touched %d blocks", len(extra))
            self.manager.pool.free(extra[0])
