"""Paged KV blocks and a small continuous-batching scheduler on top of them."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


class BlockAllocator:
    """Reference-counted physical blocks."""

    def __init__(self, num_blocks: int):
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        bid = self._free.popleft()  # clean: returned to the caller with one reference
        self._refs[bid] = 1
        return bid

    def allocate_many(self, n: int) -> list[int] | None:
        out: list[int] = []
        for _ in range(n):
            bid = self.allocate()  # leak: when the pool runs dry halfway, None is returned and `out` is dropped
            if bid is None:
                return None
            out.append(bid)
        return out

    def share(self, bid: int) -> int:
        self._refs[bid] += 1
        return bid

    def free(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)


@dataclass
class SequenceState:
    seq_id: str
    num_tokens: int
    prefix_blocks: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    cow_block: int | None = None


class Scheduler:
    def __init__(self, allocator: BlockAllocator, block_size: int = 16):
        self.allocator = allocator
        self.block_size = block_size
        self.running: dict[str, SequenceState] = {}
        self.waiting: deque[SequenceState] = deque()

    def _blocks_needed(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def admit(self, seq: SequenceState) -> bool:
        if seq.block_table:
            return True
        shared = []
        for b in seq.prefix_blocks:
            shared.append(self.allocator.share(b))  # leak: the failed allocate_many below returns without freeing the shared prefix
        fresh = self.allocator.allocate_many(  # clean: goes into the block table, freed by finish()
            self._blocks_needed(seq.num_tokens) - len(shared)
        )
        if fresh is None:
            self.waiting.append(seq)
            return False
        seq.block_table = shared + fresh
        self.running[seq.seq_id] = seq
        return True

    def admit_fork(self, parent: SequenceState, child: SequenceState) -> bool:
        if child.block_table:
            return False
        taken = []
        for b in parent.block_table[:-1]:
            taken.append(self.allocator.share(b))  # clean: near miss, rolled back by the loop when the tail is missing
        tail = self.allocator.allocate()  # clean: None on failure, otherwise in the child's table
        if tail is None:
            for b in taken:
                self.allocator.free(b)
            return False
        child.block_table = [*taken, tail]
        self.running[child.seq_id] = child
        return True

    def grow(self, seq: SequenceState) -> bool:
        if seq.num_tokens % self.block_size:
            seq.num_tokens += 1
            return True
        bid = self.allocator.allocate()  # clean: near miss, the early return is only taken with nothing allocated
        if bid is None:
            return False
        seq.block_table.append(bid)
        seq.num_tokens += 1
        return True

    def copy_on_write(self, seq: SequenceState, copies: list[tuple[int, int]]) -> bool:
        last = seq.block_table[-1]
        new = self.allocator.allocate()  # clean: replaces the last entry of the table
        if new is None:
            return False
        copies.append((last, new))
        seq.block_table[-1] = new
        self.allocator.free(last)
        return True

    def prepare_speculation(self, seqs: list[SequenceState], limit: int) -> list[tuple[str, int]]:
        plan = []
        for seq in seqs:
            scratch = self.allocator.allocate()  # leak: the `continue` for short sequences skips the free
            if scratch is None:
                break
            if seq.num_tokens < limit:
                continue
            plan.append((seq.seq_id, scratch))
            self.allocator.free(scratch)
        return plan

    def probe_capacity(self, n: int) -> bool:
        got = self.allocator.allocate_many(n)  # clean: near miss, every non-None result is freed before return
        ok = got is not None
        if ok:
            for bid in got:
                self.allocator.free(bid)
        return ok

    def reserve_cow(self, seq: SequenceState) -> bool:
        seq.cow_block = self.allocator.allocate()  # leak: finish() and preempt() empty the block table but never the cow block
        return seq.cow_block is not None

    def preempt(self, seq: SequenceState) -> None:
        self.finish(seq)
        seq.num_tokens = 0
        self.waiting.appendleft(seq)

    def finish(self, seq: SequenceState) -> None:
        for bid in seq.block_table:
            self.allocator.free(bid)
        seq.block_table = []
        self.running.pop(seq.seq_id, None)
