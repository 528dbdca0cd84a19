"""Continuous batching scheduler over a paged KV cache with hash based prefix sharing."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)
BLOCK = 16


class BlockPool:
    """Physical KV blocks with reference counts."""

    def __init__(self, num_blocks: int):
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def refcount(self, block: int) -> int:
        return self._refs[block]


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    scratch: int | None = None
    computed: int = 0
    done: bool = False


class Scheduler:
    def __init__(self, pool: BlockPool, max_running: int = 64):
        self.pool = pool
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.prefix: dict[int, int] = {}
        self.preempted = 0

    def submit(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _match_prefix(self, seq: Sequence) -> int:
        hits = 0
        for start in range(0, len(seq.tokens) - BLOCK + 1, BLOCK):
            key = hash(tuple(seq.tokens[: start + BLOCK]))
            block = self.prefix.get(key)
            if block is None:
                break
            seq.blocks.append(self.pool.incref(block))  # clean: kept in seq.blocks, given back by _release_blocks
            hits += 1
        seq.computed = hits * BLOCK
        return hits

    def _admit(self, seq: Sequence) -> bool:
        hits = self._match_prefix(seq)
        need = -(-len(seq.tokens) // BLOCK) - hits
        for _ in range(need):
            block = self.pool.allocate()  # clean: appended to seq.blocks, rolled back by _release_blocks on shortage
            if block is None:
                self._release_blocks(seq)
                return False
            seq.blocks.append(block)
        return True

    def _admit_chunk(self, seq: Sequence, chunk: int) -> bool:
        """Chunked prefill: only the blocks of this chunk are wanted now."""
        need = -(-chunk // BLOCK)
        fresh: list[int] = []
        for _ in range(need):
            block = self.pool.allocate()  # leak: on shortage the blocks already in fresh are dropped by return False
            if block is None:
                logger.debug("chunk of seq %d deferred, %d blocks short", seq.seq_id, need - len(fresh))
                return False
            fresh.append(block)
        seq.blocks.extend(fresh)
        return True

    def schedule(self) -> list[Sequence]:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            if not self._admit(seq):
                break
            self.waiting.popleft()
            self.running[seq.seq_id] = seq
        batch = []
        for seq in list(self.running.values()):
            if seq.computed < len(seq.tokens) and not self._admit_chunk(seq, BLOCK):
                self.preempt(seq)
                continue
            batch.append(seq)
        return batch

    def append_slot(self, seq: Sequence, token: int) -> bool:
        seq.tokens.append(token)
        if len(seq.tokens) % BLOCK != 1:
            return True
        last = seq.blocks[-1]
        block = self.pool.allocate()  # clean: appended to seq.blocks unless None
        if block is None:
            seq.tokens.pop()
            return False
        logger.debug("seq %d grows %d -> %d", seq.seq_id, last, block)
        seq.blocks.append(block)
        return True

    def copy_on_write(self, seq: Sequence) -> tuple[int, int] | None:
        last = seq.blocks[-1]
        if self.pool.refcount(last) == 1:
            return None
        fresh = self.pool.allocate()  # clean: takes the place of last in seq.blocks
        if fresh is None:
            self.preempt(seq)
            return None
        self.pool.free(last)
        seq.blocks[-1] = fresh
        return last, fresh

    def fork(self, parent: Sequence, seq_id: int) -> Sequence:
        child = Sequence(seq_id, list(parent.tokens), computed=parent.computed)
        for block in parent.blocks:
            self.pool.incref(block)  # clean: near miss, result unused but child.blocks gets the same ids below
        child.blocks = list(parent.blocks)
        self.running[seq_id] = child
        return child

    def probe_shared(self, seq: Sequence) -> int:
        """How many leading blocks of a waiting request could be shared right now."""
        shared = 0
        for start in range(0, len(seq.tokens) - BLOCK + 1, BLOCK):
            block = self.prefix.get(hash(tuple(seq.tokens[: start + BLOCK])))
            if block is None:
                break
            self.pool.incref(block)  # leak: continue skips the free when the block is held by one sequence only
            if self.pool.refcount(block) == 2:
                continue
            shared += 1
            self.pool.free(block)
        return shared

    def attach_scratch(self, seq: Sequence) -> bool:
        if seq.scratch is not None:
            return True
        seq.scratch = self.pool.allocate()  # leak: rotate_scratch overwrites seq.scratch without freeing it
        return seq.scratch is not None

    def rotate_scratch(self, seq: Sequence) -> None:
        if seq.scratch is None:
            return
        logger.debug("rotating scratch of %d", seq.seq_id)
        seq.scratch = self.pool.allocate()  # leak: the next rotation overwrites this block without freeing it

    def publish(self, seq: Sequence, index: int) -> None:
        key = hash(tuple(seq.tokens[: (index + 1) * BLOCK]))
        if key in self.prefix:
            return
        self.prefix[key] = self.pool.incref(seq.blocks[index])  # clean: evict_prefix frees what the table holds

    def evict_prefix(self, wanted: int) -> int:
        evicted = 0
        for key in list(self.prefix):
            if evicted == wanted:
                break
            self.pool.free(self.prefix.pop(key))
            evicted += 1
        return evicted

    def _release_blocks(self, seq: Sequence) -> None:
        while seq.blocks:
            self.pool.free(seq.blocks.pop())
        seq.computed = 0

    def preempt(self, seq: Sequence) -> None:
        self._release_blocks(seq)
        if seq.scratch is not None:
            self.pool.free(seq.scratch)
            seq.scratch = None
        self.running.pop(seq.seq_id, None)
        self.waiting.appendleft(seq)
        self.preempted += 1

    def finish(self, seq: Sequence) -> None:
        seq.done = True
        self.running.pop(seq.seq_id, None)
        self._release_blocks(seq)
        if seq.scratch is not None:
            self.pool.free(seq.scratch)
            seq.scratch = None


def check_null_block(pool: BlockPool, expected: int) -> bool:
    """Check that padding goes to the expected block id, as the kernels assume."""
    block = pool.allocate()  # leak: the mismatch return leaves the block allocated
    if block is None:
        return False
    if block != expected:
        logger.error("padding block is %d, kernels assume %d", block, expected)
        return False
    pool.free(block)
    return True
