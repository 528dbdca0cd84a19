from __future__ import annotations

from collections import deque
from typing import Deque, List, Optional

from .kv import BlockManager
from .request import Sample, State


class Scheduler:
    def __init__(self, kv: BlockManager, max_running: int) -> None:
        self.kv = kv
        self.max_running = max_running
        self.waiting: Deque[Sample] = deque()
        self.running: List[Sample] = []

    def admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            sample = self.waiting[0]
            blocks = self.kv.alloc_n(self.kv.blocks_for(sample.length))  # clean: moved into the sample, finish and preempt free them
            if blocks is None:
                break
            self.waiting.popleft()
            sample.blocks = blocks
            sample.state = State.RUNNING
            self.running.append(sample)
            admitted += 1
        return admitted

    def admit_urgent(self, sample: Sample) -> bool:
        blocks = self.kv.alloc_n(self.kv.blocks_for(sample.length))  # leak: a full running list refuses without freeing
        if blocks is None:
            return False
        if len(self.running) >= self.max_running:
            self.waiting.appendleft(sample)
            return False
        sample.blocks = blocks
        sample.state = State.RUNNING
        self.running.append(sample)
        return True

    def extend(self, sample: Sample) -> bool:
        if self.kv.blocks_for(sample.length) <= len(sample.blocks):
            return True
        blk = self.kv.alloc()  # clean: appended to the sample's table
        if blk is None:
            return False
        sample.blocks.append(blk)
        return True

    def reserve_lookahead(self, sample: Sample, k: int) -> bool:
        extra: List[int] = []
        for _ in range(k):
            blk = self.kv.alloc()  # leak: the partial extra list is dropped when one fails
            if blk is None:
                return False
            extra.append(blk)
        sample.blocks.extend(extra)
        return True

    def reserve_draft(self, sample: Sample, k: int) -> bool:
        extra: List[int] = []
        while len(extra) < k:
            blk = self.kv.alloc()  # clean: freed on failure, else moved to the sample
            if blk is None:
                self.kv.free_all(extra)
                return False
            extra.append(blk)
        sample.blocks += extra
        return True

    def fork(self, parent: Sample, child: Sample) -> None:
        for blk in parent.blocks:
            self.kv.incref(blk)  # clean: the child's table carries the count, finish frees it
        child.blocks = list(parent.blocks)
        child.state = State.RUNNING
        self.running.append(child)

    def fork_prefix(self, parent: Sample, child: Sample, tokens: int) -> None:
        n = tokens // self.kv.block_size
        for blk in parent.blocks:
            self.kv.incref(blk)  # leak: all blocks are counted up but only the first n enter the table
        child.blocks = parent.blocks[:n]
        child.state = State.RUNNING
        self.running.append(child)

    def preempt(self) -> Optional[Sample]:
        if not self.running:
            return None
        victim = self.running.pop()
        self.kv.free_all(victim.blocks)
        victim.blocks = []
        victim.state = State.WAITING
        self.waiting.appendleft(victim)
        return victim

    def recompute(self, sample: Sample) -> bool:
        fresh = self.kv.alloc_n(self.kv.blocks_for(sample.length))  # clean: near miss, the old table is freed before it is replaced
        if fresh is None:
            return False
        old, sample.blocks = sample.blocks, fresh
        self.kv.free_all(old)
        return True

    def finish(self, sample: Sample) -> None:
        sample.state = State.DONE
        if sample in self.running:
            self.running.remove(sample)
        self.kv.free_all(sample.blocks)
        sample.blocks = []
