"""Paged KV block manager: per-sequence block tables over a flat pool of physical blocks."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class PhysBlock:
    idx: int
    refs: int = 0
    filled: int = 0


class BlockPool:
    """Fixed set of physical blocks on one device."""

    def __init__(self, num_blocks: int, block_size: int, name: str = "gpu"):
        self.block_size = block_size
        self.name = name
        self._free: Deque[PhysBlock] = deque(PhysBlock(i) for i in range(num_blocks))

    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> PhysBlock:
        if not self._free:
            raise OutOfBlocks(self.name)
        blk = self._free.popleft()
        blk.refs = 1
        blk.filled = 0
        return blk

    def allocate_many(self, n: int) -> Optional[List[PhysBlock]]:
        got: List[PhysBlock] = []
        for _ in range(n):
            if not self._free:
                self._free.extend(got)
                return None
            got.append(self._free.popleft())  # clean: near miss, a short batch is extended back onto the free list
        for blk in got:
            blk.refs = 1
            blk.filled = 0
        return got

    def allocate_aligned(self, align: int) -> Optional[PhysBlock]:
        """Large-page kernels want a block whose index is a multiple of `align`."""
        for _ in range(len(self._free)):
            blk = self._free.popleft()  # leak: a block of the wrong alignment is not put back on the free list
            if blk.idx % align == 0:
                blk.refs = 1
                blk.filled = 0
                return blk
        return None

    def share(self, blk: PhysBlock) -> PhysBlock:
        blk.refs += 1
        return blk

    def free(self, blk: PhysBlock) -> None:
        if blk.refs <= 0:
            raise ValueError(f"double free of block {blk.idx}")
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    encoder_tokens: List[int] = field(default_factory=list)
    finished: bool = False


class BlockManager:
    def __init__(self, gpu: BlockPool, cpu: BlockPool):
        self.gpu = gpu
        self.cpu = cpu
        self.tables: Dict[int, List[PhysBlock]] = {}
        self.cross_tables: Dict[int, List[PhysBlock]] = {}
        self.swapped: Dict[int, List[PhysBlock]] = {}

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.gpu.block_size)

    # -- prefill ----------------------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        blocks = self.gpu.allocate_many(self._blocks_for(len(seq.tokens)))  # clean: filed in self.tables, which release() empties
        if blocks is None:
            return False
        self.tables[seq.seq_id] = blocks
        return True

    def admit_encoder_decoder(self, seq: Sequence) -> bool:
        self_blocks = self.gpu.allocate_many(self._blocks_for(len(seq.tokens)))  # leak: dropped when there is no room for the cross-attention blocks
        if self_blocks is None:
            return False
        cross = self.gpu.allocate_many(self._blocks_for(len(seq.encoder_tokens)))  # clean: filed in self.cross_tables, which release() empties
        if cross is None:
            logger.debug("seq %d: no room for cross blocks", seq.seq_id)
            return False
        self.tables[seq.seq_id] = self_blocks
        self.cross_tables[seq.seq_id] = cross
        return True

    def admit_pair(self, prompt: Sequence, negative: Sequence) -> bool:
        """Classifier-free guidance: both sequences get in or neither does."""
        first = self.gpu.allocate_many(self._blocks_for(len(prompt.tokens)))  # clean: freed one by one when the second allocation fails
        if first is None:
            return False
        second = self.gpu.allocate_many(self._blocks_for(len(negative.tokens)))  # clean: filed in self.tables, which release() empties
        if second is None:
            for blk in first:
                self.gpu.free(blk)
            return False
        self.tables.update({prompt.seq_id: first, negative.seq_id: second})
        return True

    # -- decode -----------------------------------------------------------

    def append_token(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        table = self.tables[seq.seq_id]
        last = table[-1]
        if last.filled == self.gpu.block_size:
            fresh = self.gpu.allocate()  # clean: appended to the sequence's table
            fresh.filled = 1
            table.append(fresh)
            return None
        if last.refs > 1:
            private = self.gpu.allocate()  # clean: near miss, replaces the shared block, whose reference is dropped first
            private.filled = last.filled + 1
            self.gpu.free(last)
            table[-1] = private
            return last.idx, private.idx
        last.filled += 1
        return None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.tables[child.seq_id] = [self.gpu.share(b) for b in self.tables[parent.seq_id]]  # clean: the child's table is freed by release()

    def fork_many(self, parent: Sequence, children: List[Sequence], limit: int) -> int:
        made = 0
        for child in children:
            shared = [self.gpu.share(b) for b in self.tables[parent.seq_id]]  # leak: references are kept when the fork limit has been reached
            if made >= limit:
                logger.info("fork limit %d reached for %d", limit, parent.seq_id)
                break
            self.tables[child.seq_id] = shared
            made += 1
        return made

    def lookahead(self, seq: Sequence, k: int) -> int:
        """Reserve room for k speculative tokens; returns the number of new blocks."""
        extra: List[PhysBlock] = []
        room = self.gpu.block_size - self.tables[seq.seq_id][-1].filled
        while room < k:
            try:
                extra.append(self.gpu.allocate())  # leak: blocks got so far are dropped when the pool runs out
            except OutOfBlocks:
                return 0
            room += self.gpu.block_size
        self.tables[seq.seq_id].extend(extra)
        return len(extra)

    # -- swapping ---------------------------------------------------------

    def swap_out(self, seq: Sequence) -> List[Tuple[int, int]]:
        mapping: List[Tuple[int, int]] = []
        host: List[PhysBlock] = []
        table = self.tables[seq.seq_id]
        try:
            for blk in table:
                dst = self.cpu.allocate()  # clean: freed in the except branch or filed in self.swapped
                host.append(dst)
                mapping.append((blk.idx, dst.idx))
        except OutOfBlocks:
            for dst in host:
                self.cpu.free(dst)
            raise
        self.swapped[seq.seq_id] = host
        for blk in self.tables.pop(seq.seq_id):
            self.gpu.free(blk)
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[List[Tuple[int, int]]]:
        host = self.swapped[seq.seq_id]
        device = self.gpu.allocate_many(len(host))  # clean: filed in self.tables
        if not device:
            return None
        del self.swapped[seq.seq_id]
        self.tables[seq.seq_id] = device
        mapping = [(h.idx, d.idx) for h, d in zip(host, device)]
        for h in host:
            self.cpu.free(h)
        return mapping

    def defragment(self, seq: Sequence, align: int) -> bool:
        """Move the first block of a sequence to an aligned slot."""
        target = self.gpu.allocate_aligned(align)  # leak: not freed when the head block is shared
        if target is None:
            return False
        table = self.tables[seq.seq_id]
        head = table[0]
        if head.refs > 1:
            return False
        target.filled = head.filled
        table[0] = target
        self.gpu.free(head)
        return True

    def release(self, seq_id: int) -> None:
        for blk in self.tables.pop(seq_id, ()):
            self.gpu.free(blk)
        for blk in self.cross_tables.pop(seq_id, ()):
            self.gpu.free(blk)
        for blk in self.swapped.pop(seq_id, ()):
            self.cpu.free(blk)
