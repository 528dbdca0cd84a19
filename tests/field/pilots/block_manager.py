from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Iterable, Optional


@dataclass
class KVBlock:
    block_id: int
    ref_count: int = 0
    content_hash: Optional[int] = None


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self._free: Deque[KVBlock] = deque(self.blocks)
        self._by_hash: dict[int, KVBlock] = {}

    def allocate(self) -> Optional[KVBlock]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref_count = 1
        if block.content_hash is not None:
            self._by_hash.pop(block.content_hash, None)
            block.content_hash = None
        return block

    def touch(self, content_hash: int) -> Optional[KVBlock]:
        block = self._by_hash.get(content_hash)
        if block is None:
            return None
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1
        return block

    def fork(self, block: KVBlock) -> KVBlock:
        block.ref_count += 1
        return block

    def free(self, block: KVBlock) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)

    def seal(self, block: KVBlock, content_hash: int) -> None:
        block.content_hash = content_hash
        self._by_hash[content_hash] = block

    @property
    def num_free(self) -> int:
        return len(self._free)


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    ABORTED = 3


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[KVBlock] = field(default_factory=list)
    draft_blocks: list[KVBlock] = field(default_factory=list)
    cross_block: Optional[KVBlock] = None
    status: Status = Status.WAITING


class BlockManager:
    def __init__(self, allocator: BlockAllocator, block_size: int, watermark: int):
        self.alloc = allocator
        self.block_size = block_size
        self.watermark = watermark

    def _hashes(self, tokens: list[int]) -> Iterable[int]:
        h = 0
        for i in range(0, len(tokens) - len(tokens) % self.block_size, self.block_size):
            h = hash((h, tuple(tokens[i : i + self.block_size])))
            yield h

    def allocate_prompt(self, seq: Sequence) -> bool:
        got: list[KVBlock] = []
        for h in self._hashes(seq.tokens):
            block = self.alloc.touch(h)  # clean: near miss, got is either freed on the failing way or handed to the sequence
            if block is None:
                break
            got.append(block)
        need = -(-len(seq.tokens) // self.block_size) - len(got)
        while need > 0:
            block = self.alloc.allocate()  # clean: near miss, a shortage walks got backwards and frees all
            if block is None:
                for b in reversed(got):
                    self.alloc.free(b)
                return False
            got.append(block)
            need -= 1
        seq.blocks = got
        return True

    def append_slot(self, seq: Sequence) -> bool:
        if len(seq.tokens) % self.block_size != 1:
            return True
        block = self.alloc.allocate()  # clean: near miss, only a real block reaches seq.blocks
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def cow(self, seq: Sequence) -> Optional[tuple[int, int]]:
        last = seq.blocks[-1]
        if last.ref_count == 1:
            return None
        fresh = self.alloc.allocate()  # clean: replaces the last block of the sequence, whose reference is freed
        if fresh is None:
            return None
        seq.blocks[-1] = fresh
        self.alloc.free(last)
        return last.block_id, fresh.block_id

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.blocks = [self.alloc.fork(b) for b in parent.blocks]  # clean: near miss, the child holds its own references and free_seq drops them
        if parent.cross_block is not None:
            child.cross_block = self.alloc.fork(parent.cross_block)  # clean: dropped by free_seq with the child

    def reserve_draft(self, seq: Sequence, k: int) -> int:
        for _ in range(k):
            block = self.alloc.allocate()  # leak: preempt() empties draft_blocks without freeing them
            if block is None:
                break
            seq.draft_blocks.append(block)
        return len(seq.draft_blocks)

    def commit_draft(self, seq: Sequence, accepted: int) -> None:
        keep, rest = seq.draft_blocks[:accepted], seq.draft_blocks[accepted:]
        seq.blocks.extend(keep)
        for block in rest:
            self.alloc.free(block)
        seq.draft_blocks = []

    def cached_prefix_len(self, tokens: list[int]) -> int:
        n = 0
        for h in self._hashes(tokens):
            block = self.alloc.touch(h)  # leak: a mere look-up takes a reference at each hit and gives none back
            if block is None:
                break
            n += self.block_size
        return n

    def warm(self, tokens: list[int]) -> int:
        hits = 0
        for h in self._hashes(tokens):
            block = self.alloc.touch(h)  # clean: near miss, freed at once, so that it only moves to the tail of the free list
            if block is not None:
                self.alloc.free(block)
                hits += 1
        return hits

    def encode_cross(self, seq: Sequence) -> bool:
        seq.cross_block = self.alloc.allocate()  # leak: re-encoding after preemption overwrites the cross block that preempt() keeps
        return seq.cross_block is not None

    def free_seq(self, seq: Sequence) -> None:
        for block in reversed(seq.blocks):
            self.alloc.free(block)
        seq.blocks = []
        for block in seq.draft_blocks:
            self.alloc.free(block)
        seq.draft_blocks = []
        if seq.cross_block is not None:
            self.alloc.free(seq.cross_block)
            seq.cross_block = None


class Scheduler:
    def __init__(self, manager: BlockManager, max_running: int):
        self.manager = manager
        self.max_running = max_running
        self.waiting: Deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._sinks: dict[int, KVBlock] = {}

    def schedule(self, speculative: int = 0) -> list[Sequence]:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            if not self.manager.allocate_prompt(seq):
                break
            if not self.manager.encode_cross(seq):
                self.manager.free_seq(seq)
                break
            self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)
        for seq in list(self.running):
            if not self.manager.append_slot(seq):
                self.preempt(seq)
            elif speculative:
                self.manager.reserve_draft(seq, speculative)
        return self.running

    def pin_sink(self, seq: Sequence) -> None:
        self._sinks[seq.seq_id] = self.manager.alloc.fork(seq.blocks[0])  # leak: abort() leaves the sink of the sequence in _sinks

    def preempt(self, seq: Sequence) -> None:
        for block in seq.blocks:
            self.manager.alloc.free(block)
        seq.blocks = []
        seq.draft_blocks = []
        sink = self._sinks.pop(seq.seq_id, None)
        if sink is not None:
            self.manager.alloc.free(sink)
        self.running.remove(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    def finish(self, seq: Sequence) -> None:
        self.manager.free_seq(seq)
        sink = self._sinks.pop(seq.seq_id, None)
        if sink is not None:
            self.manager.alloc.free(sink)
        seq.status = Status.FINISHED
        self.running.remove(seq)

    def abort(self, seq_id: int) -> bool:
        for seq in self.running:
            if seq.seq_id == seq_id:
                self.manager.free_seq(seq)
                seq.status = Status.ABORTED
                self.running.remove(seq)
                return True
        for seq in self.waiting:
            if seq.seq_id == seq_id:
                self.manager.free_seq(seq)
                self.waiting.remove(seq)
                seq.status = Status.ABORTED
                return True
        return False
