"""Continuous batching over the block tables."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Optional

from .blocks import NULL_BLOCK, BlockAllocator, BlockTable

log = logging.getLogger(__name__)


@dataclass
class Seq:
    seq_id: int
    prompt: list[int]
    max_new: int
    table: Optional[BlockTable] = None
    output: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, allocator: BlockAllocator, block_size: int = 16) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self.waiting: deque[Seq] = deque()
        self.running: dict[int, Seq] = {}

    def _fill(self, seq: Seq) -> bool:
        """Blocks for the prompt and what has been generated; all or nothing."""
        table = BlockTable(self._allocator, self._block_size)
        for _ in seq.prompt + seq.output:
            if not table.append_token():  # clean: near miss, released when short, else owned by seq
                table.release()
                return False
        seq.table = table
        return True

    def admit(self) -> int:
        admitted = 0
        while self.waiting and self._fill(self.waiting[0]):  # clean: near miss, finish() or preempt() ends it
            seq = self.waiting.popleft()
            self.running[seq.seq_id] = seq
            admitted += 1
        return admitted

    def preempt(self, seq_id: int) -> None:
        seq = self.running.pop(seq_id)
        seq.table.release()
        seq.table = None
        self.waiting.appendleft(seq)

    def finish(self, seq_id: int) -> list[int]:
        seq = self.running.pop(seq_id)
        seq.table.release()
        return seq.output


class BeamSearch:
    """Hypotheses of one request; every step forks the survivors."""

    def __init__(self, root: BlockTable, width: int) -> None:
        self._width = width
        self._beams: list[tuple[float, BlockTable]] = [(0.0, root)]

    def step(self, scores: list[list[float]]) -> None:
        grown: list[tuple[float, BlockTable]] = []
        for (total, table), row in zip(self._beams, scores):
            for s in row:
                grown.append((total + s, table.fork()))  # leak: forks beyond the width are cut off unreleased
            table.release()
        grown.sort(key=lambda item: item[0], reverse=True)
        self._beams = grown[: self._width]

    def finish(self) -> float:
        best = max(score for score, _ in self._beams)
        for _, table in self._beams:
            table.release()
        self._beams = []
        return best


def best_of_two(table: BlockTable, first: float, second: float) -> BlockTable:
    """Fork for the alternative answer and keep the better one; the original is consumed."""
    other = table.fork()  # clean: near miss, the loser is released, the winner goes to the caller
    if second > first:
        table.release()
        return other
    other.release()
    return table


def can_fit(allocator: BlockAllocator, blocks: int) -> bool:
    trial: list[int] = []
    for _ in range(blocks):
        block = allocator.alloc()  # leak: the blocks of a trial that succeeds are not freed
        if block == NULL_BLOCK:
            allocator.free_all(trial)
            return False
        trial.append(block)
    return True
