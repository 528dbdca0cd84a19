"""Paged KV-cache bookkeeping and a small continuous-batching scheduler.

Sequences own a block table (a list of physical blocks).  Blocks carry a
reference count because prompts may share prefixes and because parallel
sampling forks a sequence after its prefill.
"""
from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16

class NoFreeBlocks(RuntimeError):
    pass

class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"

@dataclass
class PhysicalBlock:
    idx: int
    ref: int = 0

@dataclass
class Sequence:
    seq_id: str
    token_ids: List[int]
    n_samples: int = 1
    status: Status = Status.WAITING
    block_table: List[PhysicalBlock] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)

    @property
    def num_blocks_needed(self) -> int:
        return (len(self.token_ids) + BLOCK_SIZE - 1) // BLOCK_SIZE

    @property
    def last_block_full(self) -> bool:
        return len(self.token_ids) > len(self.block_table) * BLOCK_SIZE

    def prefix_hashes(self) -> List[int]:
        out, running = [], 0
        for start in range(0, len(self.token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            running = hash((running, tuple(self.token_ids[start:start + BLOCK_SIZE])))
            out.append(running)
        return out

    def clone(self, suffix: int) -> "Sequence":
        return Sequence(f"{self.seq_id}.{suffix}", list(self.token_ids), 1, self.status)

class BlockPool:
    def __init__(self, num_blocks: int, watermark: float = 0.01) -> None:
        self._free: Deque[PhysicalBlock] = deque(PhysicalBlock(i) for i in range(num_blocks))
        self.watermark = max(1, int(num_blocks * watermark))
        self.num_blocks = num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> PhysicalBlock:
        if not self._free:
            raise NoFreeBlocks(f"all {self.num_blocks} blocks are in use")
        block = self._free.popleft()  # clean: handed to the caller with one reference
        block.ref = 1
        return block

    def allocate_many(self, n: int) -> List[PhysicalBlock]:
        out: List[PhysicalBlock] = []
        for _ in range(n):
            out.append(self.allocate())  # leak: NoFreeBlocks on a later round drops the blocks already in out
        return out

    def retain(self, block: PhysicalBlock) -> PhysicalBlock:
        block.ref += 1
        return block

    def release(self, block: PhysicalBlock) -> None:
        block.ref -= 1
        if block.ref == 0:
            self._free.append(block)

class PrefixCache:
    """Content hash -> block.  The cache owns one reference per entry."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self._pool = pool
        self._capacity = capacity
        self._entries: "OrderedDict[int, PhysicalBlock]" = OrderedDict()
        self.hits = self.misses = 0

    def lookup(self, key: int) -> Optional[PhysicalBlock]:
        block = self._entries.get(key)
        if block is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return self._pool.retain(block)  # clean: the reference goes to the caller

    def insert(self, key: int, block: PhysicalBlock) -> None:
        self._entries[key] = self._pool.retain(block)  # leak: a second insert of the same hash overwrites the entry, its reference is lost
        while len(self._entries) > self._capacity:
            _, victim = self._entries.popitem(last=False)
            self._pool.release(victim)

    def clear(self) -> None:
        while self._entries:
            _, block = self._entries.popitem()
            self._pool.release(block)

class Scheduler:
    def __init__(self, pool: BlockPool, cache: PrefixCache, max_seqs: int = 64) -> None:
        self.pool = pool
        self.cache = cache
        self.max_seqs = max_seqs
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []
        self._pinned: Dict[str, List[PhysicalBlock]] = {}

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _try_admit(self, seq: Sequence) -> bool:
        shared: List[PhysicalBlock] = []
        for key in seq.prefix_hashes():
            block = self.cache.lookup(key)  # leak: the watermark check below returns False and keeps the references in shared
            if block is None:
                break
            shared.append(block)
        need = seq.num_blocks_needed - len(shared)
        if self.pool.num_free - need < self.pool.watermark:
            logger.debug("%s needs %d blocks, %d free", seq.seq_id, need, self.pool.num_free)
            return False
        try:
            fresh = self.pool.allocate_many(need)  # clean: goes into the block table, _free_seq gives it back
        except NoFreeBlocks:
            for block in shared:
                self.pool.release(block)
            return False
        seq.block_table = shared + fresh
        seq.status = Status.RUNNING
        return True

    def _publish_prefix(self, seq: Sequence) -> None:
        for key, block in zip(seq.prefix_hashes(), seq.block_table):
            self.cache.insert(key, block)

    def _spawn_siblings(self, parent: Sequence) -> None:
        for i in range(1, parent.n_samples):
            child = parent.clone(i)
            child.block_table = [self.pool.retain(b) for b in parent.block_table]  # leak: at max_seqs the child is dropped with its references
            if len(self.running) >= self.max_seqs:
                logger.warning("%s: only %d of %d samples started", parent.seq_id, i, parent.n_samples)
                break
            self.running.append(child)

    def pin_system_prompt(self, name: str, num_tokens: int) -> List[int]:
        n = (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
        self._pinned[name] = self.pool.allocate_many(n)  # leak: pinning the same name again drops the former blocks
        return [b.idx for b in self._pinned[name]]

    def unpin_all(self) -> None:
        for blocks in self._pinned.values():
            for block in blocks:
                self.pool.release(block)
        self._pinned.clear()

    def _append_slot(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        if seq.last_block_full:
            seq.block_table.append(self.pool.allocate())  # clean: the block table owns it
            return None
        last = seq.block_table[-1]
        if last.ref > 1:
            fresh = self.pool.allocate()  # clean: near miss, takes the shared block's place in the table
            seq.block_table[-1] = fresh
            self.pool.release(last)
            return last.idx, fresh.idx
        return None

    def reassign_beam(self, dst: Sequence, src: Sequence) -> None:
        incoming = [self.pool.retain(b) for b in src.block_table]  # clean: near miss, dst's old blocks are released before the table is replaced
        for block in dst.block_table:
            self.pool.release(block)
        dst.block_table = incoming
        dst.token_ids = list(src.token_ids)

    def _free_seq(self, seq: Sequence) -> None:
        for block in seq.block_table:
            self.pool.release(block)
        seq.block_table = []

    def _preempt(self, seq: Sequence) -> None:
        self._free_seq(seq)
        self.running.remove(seq)
        seq.status = Status.PREEMPTED
        self.waiting.appendleft(seq)

    def abort(self, seq_id: str) -> bool:
        for seq in list(self.running):
            if seq.seq_id == seq_id:
                self.running.remove(seq)
                self._free_seq(seq)
                seq.status = Status.ABORTED
                return True
        before = len(self.waiting)
        self.waiting = deque(s for s in self.waiting if s.seq_id != seq_id)
        return len(self.waiting) < before

    def step(self, sampled: Dict[str, int], eos: int) -> List[Tuple[int, int]]:
        copies: List[Tuple[int, int]] = []
        for seq in list(self.running):
            if seq not in self.running:
                continue
            token = sampled.get(seq.seq_id)
            if token is None:
                continue
            if token == eos:
                self.running.remove(seq)
                self._free_seq(seq)
                seq.status = Status.FINISHED
                continue
            seq.token_ids.append(token)
            try:
                copy = self._append_slot(seq)
            except NoFreeBlocks:
                victim = max(self.running, key=lambda s: s.arrival)
                self._preempt(victim)
                continue
            if copy is not None:
                copies.append(copy)
        while self.waiting and len(self.running) < self.max_seqs:
            if not self._try_admit(self.waiting[0]):
                break
            seq = self.waiting.popleft()
            self.running.append(seq)
            self._publish_prefix(seq)
            if seq.n_samples > 1:
                self._spawn_siblings(seq)
        return copies

    def warmup(self, runner, sizes: List[int]) -> None:
        for n in sizes:
            held = self.pool.allocate_many(n)  # clean: released in the finally
            try:
                runner.execute([b.idx for b in held])
            finally:
                for block in held:
                    self.pool.release(block)
