"""Block tables of the paged KV cache: admission, copy-on-write, swapping and beam search."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional


class BlockAllocator:
    """Reference counted blocks of one device."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def fork(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def refcount(self, block: int) -> int:
        return self._refs[block]

    def num_free(self) -> int:
        return len(self._free)

    def allocate_many(self, count: int) -> Optional[list[int]]:
        if count > len(self._free):
            return None
        return [self.allocate() for _ in range(count)]  # clean: the list is handed to the caller


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)


class SequenceTable:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator, watermark: float = 0.01) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.watermark = watermark
        self._live: dict[int, Sequence] = {}
        self.rejected = 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.gpu.block_size)

    def admit(self, seq_id: int, num_tokens: int) -> bool:
        seq = Sequence(seq_id, num_tokens)
        for _ in range(self._blocks_for(num_tokens)):
            block = self.gpu.allocate()  # leak: the blocks taken so far go down with seq on exhaustion
            if block is None:
                self.rejected += 1
                return False
            seq.blocks.append(block)
        self._live[seq_id] = seq
        return True

    def admit_with_prefix(self, seq_id: int, shared: list[int], num_tokens: int) -> bool:
        seq = Sequence(seq_id, num_tokens)
        for block in shared:
            seq.blocks.append(self.gpu.fork(block))  # clean: in the table, or rolled back below
        for _ in range(self._blocks_for(num_tokens) - len(shared)):
            block = self.gpu.allocate()  # clean: near miss, the exhausted path rolls the table back
            if block is None:
                for held in seq.blocks:
                    self.gpu.free(held)
                self.rejected += 1
                return False
            seq.blocks.append(block)
        self._live[seq_id] = seq
        return True

    def grow(self, seq_id: int) -> Optional[tuple[int, int]]:
        """One more token; returns the (source, target) of a copy when the last block was shared."""
        seq = self._live[seq_id]
        if seq.num_tokens % self.gpu.block_size == 0:
            block = self.gpu.allocate()  # clean: appended to the table, which release() returns
            if block is None:
                return None
            seq.blocks.append(block)
            seq.num_tokens += 1
            return None
        last = seq.blocks[-1]
        if self.gpu.refcount(last) == 1:
            seq.num_tokens += 1
            return None
        fresh = self.gpu.allocate()  # clean: takes the place of the shared block, whose share is freed
        if fresh is None:
            return None
        self.gpu.free(last)
        seq.blocks[-1] = fresh
        seq.num_tokens += 1
        return last, fresh

    def reserve_lookahead(self, seq_id: int, count: int) -> bool:
        seq = self._live[seq_id]
        if seq.lookahead:
            return True
        extra = self.gpu.allocate_many(count)  # leak: release() returns blocks and host_blocks only
        if extra is None:
            return False
        seq.lookahead = extra
        return True

    def slot_mapping(self, seq_id: int) -> list[int]:
        seq = self._live[seq_id]
        size = self.gpu.block_size
        return [b * size + i for b in seq.blocks + seq.lookahead for i in range(size)]

    def beam_step(self, children: list[tuple[int, int, float]], floor: float) -> int:
        """children: (child id, parent id, score). Returns how many beams were pruned."""
        pruned = 0
        for child_id, parent_id, score in children:
            parent = self._live[parent_id]
            table = [self.gpu.fork(b) for b in parent.blocks]  # leak: a pruned beam's shares are dropped
            if score < floor:
                pruned += 1
                continue
            self._live[child_id] = Sequence(child_id, parent.num_tokens, table)
        return pruned

    def swap_out(self, seq_id: int) -> Optional[list[tuple[int, int]]]:
        seq = self._live[seq_id]
        if not seq.blocks:
            return None
        hosts = self.cpu.allocate_many(len(seq.blocks))  # clean: kept in host_blocks
        if hosts is None:
            return None
        mapping = list(zip(seq.blocks, hosts))
        for block in seq.blocks:
            self.gpu.free(block)
        seq.blocks = []
        seq.host_blocks = hosts
        return mapping

    def swap_in(self, seq_id: int) -> Optional[list[tuple[int, int]]]:
        seq = self._live[seq_id]
        if not seq.host_blocks:
            return None
        fresh = self.gpu.allocate_many(len(seq.host_blocks))  # clean: becomes the sequence's table
        if fresh is None:
            return None
        mapping = list(zip(seq.host_blocks, fresh))
        seq.blocks = fresh
        for host in seq.host_blocks:
            self.cpu.free(host)
        seq.host_blocks = []
        return mapping

    def compact(self, seq_id: int) -> list[tuple[int, int]]:
        """Moves a sequence toward low block numbers before a checkpoint."""
        seq = self._live[seq_id]
        moves = []
        for i, block in enumerate(seq.blocks):
            target = self.gpu.allocate()  # leak: a target above the old block is neither used nor freed
            if target is None:
                break
            if target < block:
                moves.append((block, target))
                self.gpu.free(block)
                seq.blocks[i] = target
        return moves

    def compact_host(self, seq_id: int) -> list[tuple[int, int]]:
        seq = self._live[seq_id]
        moves = []
        for i, block in enumerate(seq.host_blocks):
            target = self.cpu.allocate()  # clean: near miss, the loser of the two is freed in any case
            if target is None:
                break
            winner, loser = (target, block) if target < block else (block, target)
            if winner != block:
                moves.append((block, winner))
            seq.host_blocks[i] = winner
            self.cpu.free(loser)
        return moves

    def release(self, seq_id: int) -> None:
        seq = self._live.pop(seq_id, None)
        if seq is None:
            return
        for block in seq.blocks:
            self.gpu.free(block)
        for block in seq.host_blocks:
            self.cpu.free(block)
