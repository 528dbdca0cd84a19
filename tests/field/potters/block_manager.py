"""Paged KV block manager: per-sequence block tables, sharing with copy-on-write, swap to host."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class Block:
    block_id: int
    device: str
    ref_count: int = 0
    content_hash: Optional[int] = None


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int] = field(default_factory=list)
    block_size: int = 16

    @property
    def n_blocks(self) -> int:
        return -(-len(self.tokens) // self.block_size)


class BlockAllocator:
    def __init__(self, device: str, num_blocks: int) -> None:
        self.device = device
        self._free: Deque[Block] = deque(Block(i, device) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        if not self._free:
            raise OutOfBlocks(self.device)
        block = self._free.popleft()
        block.ref_count = 1
        return block

    def try_allocate(self) -> Optional[Block]:
        if not self._free:
            return None
        return self.allocate()  # clean: handed to the caller

    def fork(self, block: Block) -> Block:
        block.ref_count += 1
        return block

    def free(self, block: Block) -> None:
        if block.ref_count <= 0:
            raise ValueError(f"double free of {block.block_id}")
        block.ref_count -= 1
        if block.ref_count == 0:
            block.content_hash = None
            self._free.append(block)


class BlockManager:
    def __init__(self, num_gpu: int, num_cpu: int, watermark: float = 0.01) -> None:
        self.gpu = BlockAllocator("cuda", num_gpu)
        self.cpu = BlockAllocator("cpu", num_cpu)
        self.watermark = int(watermark * num_gpu)
        self.tables: Dict[int, List[Block]] = {}
        self.cross_tables: Dict[int, List[Block]] = {}

    # -- prompt ------------------------------------------------------------

    def allocate_prompt(self, seq: Sequence) -> bool:
        table: List[Block] = []
        for _ in range(seq.n_blocks):
            block = self.gpu.try_allocate()  # leak: the blocks already in the local table are dropped when a later one is refused
            if block is None:
                logger.debug("seq %d deferred", seq.seq_id)
                return False
            table.append(block)
        self.tables[seq.seq_id] = table
        return True

    def allocate_cross(self, seq: Sequence, n_encoder_blocks: int) -> bool:
        table: List[Block] = []
        for _ in range(n_encoder_blocks):
            block = self.gpu.try_allocate()  # clean: rolled back on refusal, else kept in the cross table
            if block is None:
                while table:
                    self.gpu.free(table.pop())
                return False
            table.append(block)
        self.cross_tables[seq.seq_id] = table
        return True

    # -- decode ------------------------------------------------------------

    def append_slot(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        table = self.tables[seq.seq_id]
        if seq.n_blocks > len(table):
            table.append(self.gpu.allocate())  # clean: the table owns it
            return None
        last = table[-1]
        if last.ref_count == 1:
            return None
        fresh = self.gpu.allocate()  # clean: near miss, replaces the shared block whose reference is dropped below
        table[-1] = fresh
        self.gpu.free(last)
        return last.block_id, fresh.block_id

    def append_lookahead(self, seq: Sequence, k: int) -> int:
        table = self.tables[seq.seq_id]
        want = -(-(len(seq.tokens) + k) // seq.block_size)
        granted = 0
        while len(table) < want:
            extra = self.gpu.try_allocate()  # leak: below the watermark the loop stops with the block in hand
            if extra is None:
                break
            if self.gpu.num_free < self.watermark:
                break
            table.append(extra)
            granted += 1
        return granted

    def can_grow(self) -> bool:
        probe = self.gpu.try_allocate()  # clean: near miss, given back whenever there was one
        if probe is None:
            return False
        above = self.gpu.num_free >= self.watermark
        self.gpu.free(probe)
        return above

    # -- fork / swap -------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        src = self.tables[parent.seq_id]
        for block in src:
            self.gpu.fork(block)  # clean: one reference per block for the child's copied table
        self.tables[child.seq_id] = list(src)

    def swap_out(self, group: List[int]) -> Dict[int, int]:
        moved: Dict[int, Block] = {}
        for seq_id in group:
            host: List[Block] = []
            for block in self.tables[seq_id]:
                if block.block_id in moved:
                    dst = self.cpu.fork(moved[block.block_id])  # clean: into the host table
                else:
                    dst = self.cpu.allocate()  # clean: into the host table
                    moved[block.block_id] = dst
                host.append(dst)
                self.gpu.free(block)
            self.tables[seq_id] = host
        return {src: dst.block_id for src, dst in moved.items()}

    def swap_in(self, group: List[int]) -> Dict[int, int]:
        moved: Dict[int, Block] = {}
        for seq_id in group:
            device: List[Block] = []
            for block in self.tables[seq_id]:
                dst = self.gpu.allocate()  # leak: rebound to the mapped block when a sibling brought the source in before
                if block.block_id in moved:
                    dst = moved[block.block_id]
                    self.gpu.fork(dst)  # clean: second reference for the second table entry
                else:
                    moved[block.block_id] = dst
                device.append(dst)
                self.cpu.free(block)
            self.tables[seq_id] = device
        return {src: dst.block_id for src, dst in moved.items()}

    def _free_block(self, block: Block) -> None:
        (self.gpu if block.device == "cuda" else self.cpu).free(block)

    def free_sequence(self, seq_id: int) -> None:
        for block in self.tables.pop(seq_id, []):
            self._free_block(block)
        for block in self.cross_tables.pop(seq_id, []):
            self._free_block(block)

    def snapshot(self, seq_id: int) -> List[Block]:
        """Pinned view of a table for the transfer engine; pair with drop_snapshot."""
        return [self.gpu.fork(b) for b in self.tables[seq_id]]  # clean: the list of references goes to the caller

    def drop_snapshot(self, view: List[Block]) -> None:
        for block in view:
            self._free_block(block)

    def export_ids(self, seq_id: int) -> List[int]:
        view = self.snapshot(seq_id)  # leak: only ids leave, the references in the view are forgotten
        return [b.block_id for b in view]

    def checksum(self, seq_id: int) -> int:
        view = self.snapshot(seq_id)  # clean: dropped in finally
        try:
            return hash(tuple(b.content_hash for b in view))
        finally:
            self.drop_snapshot(view)
