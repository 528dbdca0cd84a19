"""Continuous-batching scheduler with paged KV blocks."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

logger = logging.getLogger(__name__)


@dataclass
class SchedulerConfig:
    block_size: int = 16
    max_running: int = 64
    watermark: int = 4
    enable_lookahead: bool = False


@dataclass
class Sequence:
    seq_id: int
    prompt_len: int
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.generated


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.popleft()

    def allocate_many(self, n: int) -> Optional[list[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def free(self, block: int) -> None:
        self._free.append(block)

    def free_many(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class Scheduler:
    def __init__(self, config: SchedulerConfig, allocator: BlockAllocator) -> None:
        self.config = config
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self.config.max_running:
            seq = self.waiting[0]
            need = self._blocks_for(seq.num_tokens)
            blocks = self.allocator.allocate_many(need)  # clean: stored in the sequence, retire() frees them
            if blocks is None:
                break
            seq.blocks.extend(blocks)
            self.waiting.popleft()
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def admit_with_watermark(self) -> int:
        count = 0
        while self.waiting:
            seq = self.waiting.popleft()
            need = self._blocks_for(seq.num_tokens)
            blocks = self.allocator.allocate_many(need)  # leak: below the watermark the sequence goes back without the blocks
            if blocks is None:
                self.waiting.appendleft(seq)
                break
            if self.allocator.num_free < self.config.watermark:
                logger.debug("watermark reached, seq %d waits", seq.seq_id)
                self.waiting.appendleft(seq)
                break
            seq.blocks = blocks
            self.running.append(seq)
            count += 1
        return count

    def grow(self, seq: Sequence) -> bool:
        """Append one token slot; returns False when out of memory."""
        if self._blocks_for(seq.num_tokens + 1) <= len(seq.blocks):
            return True
        block = self.allocator.allocate()  # clean: appended to the sequence when there is one
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def reserve_lookahead(self, seq: Sequence, steps: int) -> list[int]:
        extra: list[int] = []
        for _ in range(steps):
            block = self.allocator.allocate()  # leak: when the pool runs dry the ones taken so far are forgotten
            if block is None:
                return []
            extra.append(block)
        seq.blocks.extend(extra)
        return extra

    def reserve_lookahead_window(self, seq: Sequence, steps: int) -> bool:
        extra: list[int] = []
        for _ in range(steps):
            block = self.allocator.allocate()  # clean: near miss, the partial list is freed before giving up
            if block is None:
                self.allocator.free_many(extra)
                return False
            extra.append(block)
        seq.blocks.extend(extra)
        return True

    def fork(self, parent: Sequence, child_id: int) -> Optional[Sequence]:
        child = Sequence(seq_id=child_id, prompt_len=parent.num_tokens)
        blocks = self.allocator.allocate_many(len(parent.blocks))  # leak: a full running list returns None with the blocks still taken
        if blocks is None:
            return None
        if len(self.running) >= self.config.max_running:
            logger.warning("cannot fork %d, running list is full", parent.seq_id)
            return None
        child.blocks = blocks
        self.running.append(child)
        return child

    def probe(self) -> bool:
        block = self.allocator.allocate()  # clean: near miss, a probe that gives the block straight back
        ok = block is not None
        if ok:
            self.allocator.free(block)
        return ok

    def preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.allocator.free_many(seq.blocks)
        seq.blocks = []
        self.waiting.appendleft(seq)

    def retire(self) -> int:
        done = [s for s in self.running if s.finished]
        for seq in done:
            self.allocator.free_many(seq.blocks)
            seq.blocks = []
        self.running = [s for s in self.running if not s.finished]
        return len(done)
