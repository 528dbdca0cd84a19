"""Paged KV block manager: block tables, copy on write, forking and swapping to host memory."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

logger = logging.getLogger(__name__)

MAX_COPIES_PER_STEP = 64


class BlockAllocator:
    """Reference counted allocator over a fixed number of KV blocks."""

    def __init__(self, num_blocks: int, tag: str) -> None:
        self.tag = tag
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    @property
    def num_free(self) -> int:
        return len(self._free)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    on_host: bool = False
    score: float = 0.0


class BlockManager:
    def __init__(self, gpu_blocks: int, host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.gpu = BlockAllocator(gpu_blocks, "gpu")
        self.host = BlockAllocator(host_blocks, "host")
        self.copies: list[tuple[int, int]] = []
        self.null_block = self.gpu.allocate()  # clean: dropped in close()

    def close(self) -> None:
        if self.null_block is not None:
            self.gpu.drop(self.null_block)
            self.null_block = None

    def _take_many(self, count: int) -> Optional[list[int]]:
        taken: list[int] = []
        for _ in range(count):
            block = self.gpu.allocate()  # clean: rolled back below or handed to the caller
            if block is None:
                for got in taken:
                    self.gpu.drop(got)
                return None
            taken.append(block)
        return taken

    def blocks_needed(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.block_size)

    def admit(self, seq: Sequence) -> bool:
        need = self.blocks_needed(seq)
        if need > self.gpu.num_free:
            logger.debug("seq %d needs %d blocks, %d free", seq.seq_id, need, self.gpu.num_free)
            return False
        blocks = self._take_many(need)  # clean: kept in seq.blocks until release()
        if blocks is None:
            return False
        seq.blocks.extend(blocks)
        return True

    def append_slot(self, seq: Sequence) -> bool:
        """Make room for one more token of `seq`."""
        if len(seq.tokens) % self.block_size == 0:
            block = self.gpu.allocate()  # clean: appended to the sequence's table
            if block is None:
                return False
            seq.blocks.append(block)
            return True
        last = seq.blocks[-1]
        if not self.gpu.is_shared(last):
            return True
        fresh = self.gpu.allocate()  # leak: return False at the copy limit keeps no track of it
        if fresh is None:
            return False
        if len(self.copies) >= MAX_COPIES_PER_STEP:
            logger.info("copy limit reached, deferring seq %d", seq.seq_id)
            return False
        self.copies.append((last, fresh))
        seq.blocks[-1] = fresh
        self.gpu.drop(last)
        return True

    def has_headroom(self) -> bool:
        probe = self.gpu.allocate()  # clean: near miss, None-checked and dropped at once
        if probe is None:
            return False
        self.gpu.drop(probe)
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.tokens = list(parent.tokens)
        child.blocks = [self.gpu.share(b) for b in parent.blocks]  # clean: release(child) drops them

    def fork_beams(self, parent: Sequence, scores: Iterable[float], floor: float) -> list[Sequence]:
        children: list[Sequence] = []
        for rank, score in enumerate(scores):
            refs = [self.gpu.share(b) for b in parent.blocks]  # leak: beams under the floor keep these
            total = parent.score + score
            if total < floor:
                continue
            child = Sequence(parent.seq_id * 1000 + rank, list(parent.tokens), refs)
            child.score = total
            children.append(child)
        return children

    def swap_out(self, seq: Sequence) -> Optional[list[tuple[int, int]]]:
        moves: list[tuple[int, int]] = []
        for block in seq.blocks:
            target = self.host.allocate()  # clean: rolled back on None, else becomes the table
            if target is None:
                for _, got in moves:
                    self.host.drop(got)
                return None
            moves.append((block, target))
        for block in seq.blocks:
            self.gpu.drop(block)
        seq.blocks = [dst for _, dst in moves]
        seq.on_host = True
        return moves

    def swap_in(self, seq: Sequence) -> Optional[list[tuple[int, int]]]:
        moves: list[tuple[int, int]] = []
        for block in seq.blocks:
            target = self.gpu.allocate()  # leak: the blocks taken before a None are not dropped
            if target is None:
                logger.warning("swap in of %d stopped after %d blocks", seq.seq_id, len(moves))
                return None
            moves.append((block, target))
        for src, _ in moves:
            self.host.drop(src)
        seq.blocks = [dst for _, dst in moves]
        seq.on_host = False
        return moves

    def reserve_lookahead(self, seq: Sequence, depth: int) -> int:
        """Blocks for speculative tokens; settled by commit_lookahead()."""
        extra = self._take_many(depth)  # leak: commit_lookahead() drops the unaccepted rest on the floor
        if extra is None:
            return 0
        seq.lookahead.extend(extra)
        return len(extra)

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        used = -(-accepted // self.block_size)
        seq.blocks.extend(seq.lookahead[:used])
        seq.lookahead = []

    def defragment(self, seqs: Iterable[Sequence], limit: int) -> int:
        """Move blocks towards low indices so that the tail of the cache can be unmapped."""
        moved = 0
        for seq in seqs:
            if seq.on_host or not seq.blocks:
                continue
            old = max(seq.blocks)
            better = self.gpu.allocate()  # leak: a block that is not lower than the old one is skipped over
            if better is None:
                break
            if better > old:
                continue
            seq.blocks[seq.blocks.index(old)] = better
            self.copies.append((old, better))
            self.gpu.drop(old)
            moved += 1
            if moved == limit:
                break
        return moved

    def release(self, seq: Sequence) -> None:
        pool = self.host if seq.on_host else self.gpu
        for block in seq.blocks:
            pool.drop(block)
        seq.blocks.clear()
        for block in seq.lookahead:
            self.gpu.drop(block)
        seq.lookahead.clear()
