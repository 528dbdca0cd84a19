"""Paged KV block bookkeeping for the decode engine."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple


@dataclass
class KVBlock:
    block_id: int
    ref_count: int = 0


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[KVBlock] = deque(KVBlock(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[KVBlock]:
        if not self._free:
            return None
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def share(self, block: KVBlock) -> KVBlock:
        block.ref_count += 1
        return block

    def free(self, block: KVBlock) -> None:
        if block.ref_count <= 0:
            raise ValueError(f"double free of block {block.block_id}")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.append(block)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    table: List[KVBlock] = field(default_factory=list)
    cross_table: List[KVBlock] = field(default_factory=list)
    lookahead: List[KVBlock] = field(default_factory=list)


class BlockManager:
    """Owns the tables; everything in a table goes back in `free_sequence`."""

    def __init__(self, allocator: BlockAllocator, watermark: float = 0.02) -> None:
        self.allocator = allocator
        self.watermark_blocks = int(allocator.num_free * watermark)
        self.sequences: Dict[int, Sequence] = {}
        self.pending_copies: List[Tuple[int, int]] = []

    def _blocks_for(self, num_tokens: int) -> int:
        bs = self.allocator.block_size
        return (num_tokens + bs - 1) // bs

    def _take(self, n: int) -> Optional[List[KVBlock]]:
        taken: List[KVBlock] = []
        for _ in range(n):
            block = self.allocator.allocate()  # clean: given back on shortage, else returned to the caller
            if block is None:
                for b in taken:
                    self.allocator.free(b)
                return None
            taken.append(block)
        return taken

    def admit(self, seq: Sequence) -> bool:
        blocks = self._take(self._blocks_for(seq.num_tokens))  # clean: stored in the sequence's table
        if blocks is None:
            return False
        seq.table.extend(blocks)
        self.sequences[seq.seq_id] = seq
        return True

    def admit_encoder_decoder(self, seq: Sequence, encoder_tokens: int) -> bool:
        own = self._take(self._blocks_for(seq.num_tokens))  # leak: cross allocation fails and `own` is not rolled back
        if own is None:
            return False
        cross = self._take(self._blocks_for(encoder_tokens))  # clean: stored in cross_table when obtained
        if cross is None:
            return False
        seq.table = own
        seq.cross_table = cross
        self.sequences[seq.seq_id] = seq
        return True

    def can_append(self, seq: Sequence) -> bool:
        """True when one more decode step fits above the watermark."""
        if seq.num_tokens % self.allocator.block_size:
            return True
        block = self.allocator.allocate()  # leak: below the watermark the probe block is never freed
        if block is None:
            return False
        if self.allocator.num_free < self.watermark_blocks:
            return False
        self.allocator.free(block)
        return True

    def append_slot(self, seq: Sequence) -> bool:
        if seq.num_tokens % self.allocator.block_size == 0:
            block = self.allocator.allocate()  # clean: appended to the table
            if block is None:
                return False
            seq.table.append(block)
        else:
            last = seq.table[-1]
            if last.ref_count > 1:
                fresh = self.allocator.allocate()  # clean: near miss, replaces the shared block which is freed
                if fresh is None:
                    return False
                self.pending_copies.append((last.block_id, fresh.block_id))
                seq.table[-1] = fresh
                self.allocator.free(last)
        seq.num_tokens += 1
        return True

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, parent.num_tokens)
        child.table = [self.allocator.share(b) for b in parent.table]  # clean: held by the child's table
        self.sequences[child_id] = child
        return child

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        got = 0
        while got < k:
            block = self.allocator.allocate()  # clean: near miss, partial reservation stays on seq.lookahead
            if block is None:
                break
            seq.lookahead.append(block)
            got += 1
        return got

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        used = min(self._blocks_for(accepted), len(seq.lookahead))
        seq.table.extend(seq.lookahead[:used])
        for block in seq.lookahead[used:]:
            self.allocator.free(block)
        seq.lookahead = []

    def relocate(self, seq: Sequence) -> bool:
        """Move a sequence to fresh blocks so its old range can be unmapped."""
        fresh: List[KVBlock] = []
        for _ in seq.table:
            block = self.allocator.allocate()  # leak: on shortage the blocks gathered so far are dropped
            if block is None:
                return False
            fresh.append(block)
        for old, new in zip(seq.table, fresh):
            self.pending_copies.append((old.block_id, new.block_id))
            self.allocator.free(old)
        seq.table = fresh
        return True

    def compact(self, seq: Sequence) -> bool:
        fresh: List[KVBlock] = []
        while len(fresh) < len(seq.table):
            block = self.allocator.allocate()  # clean: near miss, a short list becomes `doomed` and is freed
            if block is None:
                break
            fresh.append(block)
        if len(fresh) < len(seq.table):
            doomed = fresh
        else:
            self.pending_copies.extend((o.block_id, n.block_id) for o, n in zip(seq.table, fresh))
            doomed, seq.table = seq.table, fresh
        for block in doomed:
            self.allocator.free(block)
        return doomed is not fresh

    def prefetch(self, seqs: List[Sequence]) -> int:
        """Give every sequence that is about to cross a block boundary its next block."""
        done = 0
        for seq in seqs:
            block = self.allocator.allocate()  # leak: `continue` for a sequence that left keeps the block
            if block is None:
                break
            if seq.seq_id not in self.sequences:
                continue
            seq.table.append(block)
            done += 1
        return done

    def free_sequence(self, seq: Sequence) -> None:
        for block in (*seq.table, *seq.cross_table, *seq.lookahead):
            self.allocator.free(block)
        seq.table, seq.cross_table, seq.lookahead = [], [], []
        self.sequences.pop(seq.seq_id, None)
