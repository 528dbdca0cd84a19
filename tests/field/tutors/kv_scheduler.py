"""Continuous batching scheduler over a paged KV cache."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class BlockPool:
    """Physical KV blocks, kept in a deque of idle ids."""

    def __init__(self, num_blocks: int) -> None:
        self._idle: deque[int] = deque(range(num_blocks))

    def take(self) -> Optional[int]:
        if not self._idle:
            return None
        return self._idle.popleft()

    def take_run(self, count: int) -> Optional[list[int]]:
        run: list[int] = []
        for _ in range(count):
            if not self._idle:
                return None
            run.append(self._idle.popleft())  # leak: running dry returns None and forgets the partial run
        return run

    def give(self, block: int) -> None:
        self._idle.append(block)

    def give_run(self, blocks: list[int]) -> None:
        self._idle.extend(blocks)


@dataclass
class Sequence:
    seq_id: str
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    aborted: bool = False


class Scheduler:
    """Admits, grows, preempts and retires sequences."""

    def __init__(self, pool: BlockPool, block_size: int, max_running: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def _blocks_for(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.block_size)

    def admit(self) -> int:
        admitted = 0
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            run = self.pool.take_run(self._blocks_for(seq))  # leak: an aborted sequence is skipped after its blocks are taken
            if run is None:
                break
            self.waiting.popleft()
            if seq.aborted:
                continue
            seq.table = run
            self.running.append(seq)
            admitted += 1
        return admitted

    def admit_urgent(self, seq: Sequence) -> bool:
        run = self.pool.take_run(self._blocks_for(seq))  # clean: near miss, aborted branch returns the run
        if run is None:
            self.waiting.appendleft(seq)
            return False
        if seq.aborted:
            self.pool.give_run(run)
            return False
        seq.table = run
        self.running.append(seq)
        return True

    def grow(self, seq: Sequence) -> bool:
        if len(seq.tokens) <= len(seq.table) * self.block_size:
            return True
        block = self.pool.take()  # clean: near miss, only None preempts, otherwise it joins the table
        if block is None:
            self.preempt(seq)
            return False
        seq.table.append(block)
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        extra: list[int] = []
        for _ in range(k):
            block = self.pool.take()  # clean: near miss, a shortfall gives back all collected blocks
            if block is None:
                self.pool.give_run(extra)
                return False
            extra.append(block)
        seq.table.extend(extra)
        return True

    def fork(self, parent: Sequence, child_id: str) -> Optional[Sequence]:
        run = self.pool.take_run(len(parent.table))  # clean: goes into the child's table, which retire empties
        if run is None:
            return None
        child = Sequence(child_id, list(parent.tokens), table=run)
        self.running.append(child)
        return child

    def move_tail(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        fresh = self.pool.take()  # leak: replaces the tail entry, whose old block is never given back
        if fresh is None:
            return False
        copies.append((seq.table[-1], fresh))
        seq.table[-1] = fresh
        return True

    def move_head(self, seq: Sequence, copies: list[tuple[int, int]]) -> bool:
        fresh = self.pool.take()  # clean: swapped into the table and the old head is given
        if fresh is None:
            return False
        old, seq.table[0] = seq.table[0], fresh
        copies.append((old, fresh))
        self.pool.give(old)
        return True

    def has_headroom(self) -> bool:
        return self.pool.take() is not None  # leak: the probe takes a block and keeps only the answer

    def warm_up(self, count: int, touched: set[int]) -> None:
        run = self.pool.take_run(count)  # clean: given back after touching
        if run is None:
            return
        touched.update(run)
        self.pool.give_run(run)

    def draft_table(self, count: int) -> list[int]:
        run = self.pool.take_run(count)  # leak: the slice handed out omits the first block
        return run[1:] if run else []

    def renew(self, seq: Sequence, count: int) -> bool:
        run = self.pool.take_run(count)  # clean: near miss, the old table is given before it is replaced
        if run is None:
            return False
        self.pool.give_run(seq.table)
        seq.table = run
        return True

    def preempt(self, seq: Sequence) -> None:
        self.retire(seq)
        self.waiting.appendleft(seq)

    def retire(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.give_run(seq.table)
        seq.table = []
