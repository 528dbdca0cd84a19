from __future__ import annotations

from collections import deque
from typing import Optional

from .block_manager import Block, BlockPool
from .prefix import PrefixTree
from .sequence import Sequence


class Scheduler:
    def __init__(self, pool: BlockPool, prefix: PrefixTree, watermark: int = 1) -> None:
        self.pool = pool
        self.prefix = prefix
        self.watermark = watermark
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def _blocks_needed(self, seq: Sequence) -> int:
        size = self.pool.block_size
        return (len(seq.prompt) + size - 1) // size

    def admit(self) -> Optional[Sequence]:
        if not self.waiting:
            return None
        seq = self.waiting[0]
        shared = self.prefix.match(seq.prompt)  # leak: no room for the rest returns with the matched blocks forked
        rest = self.pool.allocate_many(self._blocks_needed(seq) - len(shared))  # clean: moved into the table
        if rest is None:
            return None
        self.waiting.popleft()
        seq.table = shared + rest
        self.running.append(seq)
        return seq

    def readmit(self, seq: Sequence) -> bool:
        """After a preemption by recompute; the table is empty here."""
        shared = self.prefix.match(seq.prompt)  # clean: near miss, freed on both refusals, else moved into the table
        need = self._blocks_needed(seq) - len(shared)
        if self.pool.num_free - need < self.watermark:
            self.pool.free_all(shared)
            return False
        rest = self.pool.allocate_many(need)  # clean: moved into the table
        if rest is None:
            self.pool.free_all(shared)
            return False
        seq.table.extend(shared)
        seq.table.extend(rest)
        self.running.append(seq)
        return True

    def append_token(self, seq: Sequence, token: int) -> bool:
        last = seq.table[-1]
        if last.full:
            block = self.pool.allocate()  # clean: appended to the table
            if block is None:
                return False
            seq.table.append(block)
            last = block
        elif last.ref_count > 1:
            block = self.pool.copy(last)  # clean: near miss, copy on write frees the shared one it replaces
            if block is None:
                return False
            self.pool.free(last)
            seq.table[-1] = block
            last = block
        last.tokens.append(token)
        seq.output.append(token)
        return True

    def reserve_lookahead(self, seq: Sequence, n: int) -> int:
        """Blocks for speculative tokens; returns how many were added."""
        added = 0
        for _ in range(n):
            block = self.pool.allocate()  # leak: under the watermark it breaks with the block in hand
            if block is None:
                break
            if self.pool.num_free < self.watermark:
                break
            seq.table.append(block)
            added += 1
        return added

    def preempt(self) -> Optional[Sequence]:
        if not self.running:
            return None
        victim = self.running.pop()
        victim.release(self.pool)
        self.waiting.appendleft(victim)
        return victim

    def defragment(self, seq: Sequence) -> int:
        """Move the table to low block ids."""
        moved = 0
        for i, old in enumerate(seq.table):
            if old.ref_count > 1:
                continue
            new: Optional[Block] = self.pool.copy(old)  # leak: the higher id is passed over with continue
            if new is None:
                break
            if new.block_id > old.block_id:
                continue
            seq.table[i] = new
            self.pool.free(old)
            moved += 1
        return moved

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.prefix.insert(seq.prompt, seq.table)
        seq.release(self.pool)


def main() -> None:
    pool = BlockPool(8, 4)
    sched = Scheduler(pool, PrefixTree(pool))
    sched.waiting.append(Sequence(list(range(8))))
    seq = sched.admit()  # clean: the running list holds it, finish releases
    assert seq is not None
    for t in range(3):
        sched.append_token(seq, t)
    sched.finish(seq)
    print("free", pool.num_free, "tail", sched.prefix.peek_tail(list(range(8))))


if __name__ == "__main__":
    main()
