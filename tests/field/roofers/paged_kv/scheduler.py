from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Optional, Sequence

from .allocator import BlockAllocator
from .prefix import PrefixIndex
from .table import BlockTable


@dataclass
class SeqState:
    sid: int
    digests: list[int]
    prompt_len: int
    table: Optional[BlockTable] = None


class Scheduler:
    def __init__(self, allocator: BlockAllocator, index: PrefixIndex, block_size: int) -> None:
        self.allocator = allocator
        self.index = index
        self.block_size = block_size
        self.waiting: deque[SeqState] = deque()
        self.running: dict[int, SeqState] = {}

    def try_start(self, seq: SeqState) -> bool:
        cached = self.index.match(seq.digests)  # clean: near miss, the table adopts the counts and releases them when the rest does not fit
        table = BlockTable(self.allocator, self.block_size)
        table.adopt(cached)
        rest = max(seq.prompt_len - table.length, 0)
        if not table.append_tokens(rest):
            table.release()
            return False
        seq.table = table
        self.running[seq.sid] = seq
        return True

    def try_start_exclusive(self, seq: SeqState) -> bool:
        """For sequences that write into their prompt: no sharing of short hits."""
        cached = self.index.match(seq.digests)  # leak: a hit under two blocks is ignored with its count
        table = BlockTable(self.allocator, self.block_size)
        if len(cached) >= 2:
            table.adopt(cached)
        if not table.append_tokens(max(seq.prompt_len - table.length, 0)):
            table.release()
            return False
        seq.table = table
        self.running[seq.sid] = seq
        return True

    def finish(self, sid: int) -> None:
        seq = self.running.pop(sid)
        for d, b in zip(seq.digests, seq.table.blocks):
            self.index.insert(d, b)
        seq.table.release()
        seq.table = None

    def start_alternatives(self, seq: SeqState, alternatives: Sequence[Sequence[int]]) -> None:
        hit = self.index.best_of(alternatives)  # clean: adopted by the table
        seq.table = BlockTable(self.allocator, self.block_size)
        if hit:
            seq.table.adopt(hit)
        self.running[seq.sid] = seq
