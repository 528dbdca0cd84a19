import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Set

logger = logging.getLogger("engine.blocks")


class NoFreeBlocksError(RuntimeError):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free_ids: Deque[int] = deque(range(num_blocks))

    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self) -> int:
        if not self.free_ids:
            raise NoFreeBlocksError("out of KV blocks")
        return self.free_ids.popleft()

    def try_allocate(self) -> Optional[int]:
        return self.free_ids.popleft() if self.free_ids else None

    def free(self, block_id: int) -> None:
        self.free_ids.append(block_id)

    def free_many(self, ids: List[int]) -> None:
        for i in ids:
            self.free(i)


@dataclass
class Sequence:
    seq_id: int
    num_tokens: int
    blocks: List[int] = field(default_factory=list)


class BlockSpaceManager:
    def __init__(self, num_gpu: int, num_cpu: int, block_size: int = 16, watermark: float = 0.01):
        self.block_size = block_size
        self.gpu = BlockAllocator(num_gpu)
        self.cpu = BlockAllocator(num_cpu)
        self.tables: Dict[int, List[int]] = {}
        self.on_host: Set[int] = set()
        self.watermark_blocks = int(watermark * num_gpu)

    def _need(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> bool:
        return self.gpu.num_free() - self._need(seq.num_tokens) >= self.watermark_blocks

    def allocate_slots(self, seq: Sequence) -> bool:
        got: List[int] = []
        for _ in range(self._need(seq.num_tokens)):
            b = self.gpu.try_allocate()  # clean: near miss, partial set is freed when one is missing
            if b is None:
                self.gpu.free_many(got)
                return False
            got.append(b)
        self.tables[seq.seq_id] = got
        return True

    def allocate_greedy(self, seq: Sequence) -> bool:
        got: List[int] = []
        while len(got) < self._need(seq.num_tokens):
            b = self.gpu.try_allocate()  # leak: blocks already in got are dropped when the pool runs out
            if b is None:
                logger.warning("seq %d: %d blocks short", seq.seq_id, self._need(seq.num_tokens) - len(got))
                return False
            got.append(b)
        self.tables[seq.seq_id] = got
        return True

    def append_slot(self, seq: Sequence) -> bool:
        table = self.tables[seq.seq_id]
        if seq.num_tokens % self.block_size:
            return True
        blk = self.gpu.try_allocate()  # clean: joins the sequence's table
        if blk is None:
            return False
        table.append(blk)
        return True

    def append_reserved(self, seq: Sequence, limit: int) -> bool:
        blk = self.gpu.allocate()  # leak: a full table refuses the block and nobody frees it
        table = self.tables.get(seq.seq_id, [])
        if len(table) >= limit:
            return False
        table.append(blk)
        self.tables[seq.seq_id] = table
        return True

    def swap_out(self, seq: Sequence) -> Optional[Dict[int, int]]:
        gpu_blocks = self.tables[seq.seq_id]
        mapping: Dict[int, int] = {}
        try:
            for g in gpu_blocks:
                mapping[g] = self.cpu.allocate()  # leak: handler forgets the host blocks taken so far
        except NoFreeBlocksError:
            logger.warning("host pool exhausted, cannot swap seq %d", seq.seq_id)
            return None
        self.gpu.free_many(gpu_blocks)
        self.on_host.add(seq.seq_id)
        self.tables[seq.seq_id] = list(mapping.values())
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[Dict[int, int]]:
        host = self.tables[seq.seq_id]
        mapping: Dict[int, int] = {}
        try:
            for c in host:
                mapping[c] = self.gpu.allocate()  # clean: near miss, the handler frees what was taken
        except NoFreeBlocksError:
            self.gpu.free_many(list(mapping.values()))
            return None
        self.cpu.free_many(host)
        self.on_host.discard(seq.seq_id)
        self.tables[seq.seq_id] = list(mapping.values())
        return mapping

    def truncate(self, seq: Sequence, keep: int) -> None:
        table = self.tables[seq.seq_id]
        self.gpu.free_many(table[keep:])
        del table[keep:]

    def free_slots(self, seq: Sequence) -> None:
        owner = self.cpu if seq.seq_id in self.on_host else self.gpu
        self.on_host.discard(seq.seq_id)
        for b in self.tables.pop(seq.seq_id, []):
            owner.free(b)

    def copy_on_write(self, seq: Sequence, idx: int) -> int:
        fresh = self.gpu.allocate()  # clean: the old block is freed and the new one takes its place
        old = self.tables[seq.seq_id][idx]
        self.tables[seq.seq_id][idx] = fresh
        self.gpu.free(old)
        return fresh


class ScratchBlocks:
    """Blocks for a dummy profiling run."""

    def __init__(self, mgr: BlockSpaceManager):
        self.mgr = mgr

    def profile(self, n: int) -> int:
        taken = [self.mgr.gpu.allocate() for _ in range(n)]  # leak: only the first half is freed
        used = len(taken)
        self.mgr.gpu.free_many(taken[: n // 2])
        return used

    def probe(self) -> bool:
        blk = self.mgr.gpu.try_allocate()  # clean: freed when one was granted
        if blk is not None:
            self.mgr.gpu.free(blk)
        return blk is not None

    def burn_one(self) -> None:
        self.mgr.gpu.allocate()  # leak: result thrown away
