"""Paged KV block bookkeeping: allocator, block manager and beam handling."""
from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple


class NoFreeBlocks(RuntimeError):
    pass


class BlockAllocator:
    """FIFO free list of block ids with per-block reference counts."""

    def __init__(self, num_blocks: int):
        self._free = deque(range(num_blocks))
        self.ref = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise NoFreeBlocks("no free KV blocks")
        block = self._free.popleft()
        self.ref[block] = 1
        return block

    def fork(self, block: int) -> int:
        self.ref[block] += 1
        return block

    def free(self, block: int) -> None:
        self.ref[block] -= 1
        if self.ref[block] == 0:
            self._free.append(block)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    host_blocks: List[int] = field(default_factory=list)
    finished: bool = False
    score: float = 0.0


class BlockManager:
    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int):
        self.gpu = BlockAllocator(gpu_blocks)
        self.cpu = BlockAllocator(cpu_blocks)
        self.block_size = block_size
        self.by_hash: Dict[str, int] = {}
        self.running: Dict[int, Sequence] = {}

    def _blocks_for(self, n_tokens: int) -> int:
        return (n_tokens + self.block_size - 1) // self.block_size

    def admit(self, seq: Sequence) -> bool:
        need = self._blocks_for(len(seq.tokens))
        if need > self.gpu.num_free:
            return False
        for _ in range(need):
            seq.blocks.append(self.gpu.allocate())  # clean: kept in seq.blocks, which release() frees
        self.running[seq.seq_id] = seq
        return True

    def release(self, seq: Sequence) -> None:
        for b in seq.blocks:
            self.gpu.free(b)
        seq.blocks.clear()
        for h in seq.host_blocks:
            self.cpu.free(h)
        seq.host_blocks.clear()
        self.running.pop(seq.seq_id, None)

    def append_slot(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        if len(seq.blocks) < self._blocks_for(len(seq.tokens)):
            seq.blocks.append(self.gpu.allocate())  # clean: kept in seq.blocks
            return None
        last = seq.blocks[-1]
        if self.gpu.ref[last] == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, takes last's place and last's reference is dropped
        seq.blocks[-1] = fresh
        self.gpu.free(last)
        return last, fresh

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.blocks = [self.gpu.fork(b) for b in parent.blocks]  # clean: references kept in child.blocks
        self.running[child.seq_id] = child

    def expand_beams(self, parent: Sequence, candidates: List[Tuple[int, float]], width: int) -> List[Sequence]:
        kept: List[Sequence] = []
        for i, (token, score) in enumerate(candidates):
            child = Sequence(parent.seq_id * 64 + i, parent.tokens + [token], score=score)
            child.blocks = [self.gpu.fork(b) for b in parent.blocks]  # leak: a pruned child is skipped with its references
            if len(kept) >= width and score < kept[-1].score:
                continue
            self.running[child.seq_id] = child
            kept.append(child)
            kept.sort(key=lambda s: -s.score)
        return kept

    def swap_out(self, seq: Sequence) -> bool:
        moved: List[int] = []
        try:
            for _ in seq.blocks:
                moved.append(self.cpu.allocate())  # leak: blocks already in moved are dropped when the host runs out
        except NoFreeBlocks:
            return False
        for b in seq.blocks:
            self.gpu.free(b)
        seq.blocks.clear()
        seq.host_blocks = moved
        return True

    def swap_in(self, seq: Sequence) -> bool:
        taken: List[int] = []
        try:
            for _ in seq.host_blocks:
                taken.append(self.gpu.allocate())  # clean: near miss, rolled back on NoFreeBlocks
        except NoFreeBlocks:
            for b in taken:
                self.gpu.free(b)
            return False
        for h in seq.host_blocks:
            self.cpu.free(h)
        seq.host_blocks.clear()
        seq.blocks = taken
        return True

    def verify_draft(self, seq: Sequence, draft: List[int], accepted: int) -> int:
        need = self._blocks_for(len(seq.tokens) + len(draft)) - len(seq.blocks)
        if need > self.gpu.num_free:
            return 0
        extra = [self.gpu.allocate() for _ in range(need)]  # leak: dropped when no draft token is accepted
        if accepted == 0:
            return 0
        seq.tokens.extend(draft[:accepted])
        keep = self._blocks_for(len(seq.tokens)) - len(seq.blocks)
        seq.blocks.extend(extra[:keep])
        for b in extra[keep:]:
            self.gpu.free(b)
        return accepted

    def allocate_preempting(self, keep: Sequence) -> int:
        while True:
            try:
                return self.gpu.allocate()  # clean: returned to the caller
            except NoFreeBlocks:
                victims = [s for s in self.running.values() if s is not keep and s.blocks]
                if not victims:
                    raise
                self.release(min(victims, key=lambda s: s.score))

    def grow(self, seq: Sequence) -> None:
        block = self.allocate_preempting(seq)  # clean: appended to seq.blocks
        seq.blocks.append(block)

    def grow_sink(self, seq: Sequence, sink_blocks: int) -> bool:
        block = self.allocate_preempting(seq)  # leak: dropped when the sink is already full
        if len(seq.blocks) >= sink_blocks:
            return False
        seq.blocks.insert(0, block)
        return True

    @staticmethod
    def _digest(prefix: str, tokens: List[int]) -> str:
        return hashlib.sha1((prefix + ",".join(map(str, tokens))).encode()).hexdigest()

    def match_prefix(self, seq: Sequence) -> int:
        """Reuse cached full blocks from the start of the sequence; returns how many."""
        digest, n = "", 0
        while (n + 1) * self.block_size <= len(seq.tokens):
            digest = self._digest(digest, seq.tokens[n * self.block_size:(n + 1) * self.block_size])
            if digest not in self.by_hash:
                break
            seq.blocks.append(self.gpu.fork(self.by_hash[digest]))  # clean: reference kept in seq.blocks
            n += 1
        return n

    def publish(self, digest: str, block: int) -> None:
        held = self.gpu.fork(block)  # leak: extra reference lost when the digest is published already
        if digest in self.by_hash:
            return
        self.by_hash[digest] = held

    def drop_cached(self) -> None:
        while self.by_hash:
            _, block = self.by_hash.popitem()
            self.gpu.free(block)

    def migrate(self, seq: Sequence, dst: BlockAllocator) -> List[Tuple[int, int]]:
        if dst.num_free < len(seq.blocks):
            raise NoFreeBlocks("destination is full")
        old = seq.blocks
        seq.blocks = [dst.allocate() for _ in old]  # clean: the replaced list is kept in old and freed
        plan = list(zip(old, seq.blocks))
        for b in old:
            self.gpu.free(b)
        return plan
