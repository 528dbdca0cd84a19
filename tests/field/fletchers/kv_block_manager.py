"""Paged KV block manager: prefix reuse, copy-on-write, swap."""
from __future__ import annotations

import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Counted physical blocks of one device."""

    def __init__(self, device: str, num_blocks: int) -> None:
        self.device = device
        self._free: Deque[int] = deque(range(num_blocks))
        self._refs: List[int] = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfBlocks(self.device)
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def try_allocate(self) -> Optional[int]:
        if not self._free:
            return None
        return self.allocate()  # clean: handed to the caller

    def fork(self, bid: int) -> int:
        assert self._refs[bid] > 0
        self._refs[bid] += 1
        return bid

    def free(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)

    def refcount(self, bid: int) -> int:
        return self._refs[bid]


class KVBlockManager:

    def __init__(self, gpu_blocks: int, cpu_blocks: int, block_size: int = 16,
                 watermark: int = 2) -> None:
        self.gpu = BlockAllocator("gpu", gpu_blocks)
        self.cpu = BlockAllocator("cpu", cpu_blocks)
        self.block_size = block_size
        self.watermark = watermark
        self.tables: Dict[int, List[int]] = {}
        self.swapped: Dict[int, List[int]] = {}
        self.cached: Dict[int, int] = {}

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    # -- admission -----------------------------------------------------

    def allocate_prompt(self, seq_id: int, num_tokens: int) -> bool:
        assert seq_id not in self.tables
        table: List[int] = []
        for _ in range(self._blocks_for(num_tokens)):
            bid = self.gpu.try_allocate()  # leak: blocks taken so far are dropped when a later one is None
            if bid is None:
                return False
            table.append(bid)
        self.tables[seq_id] = table
        return True

    def lookup_prefix(self, hashes: Sequence[int]) -> List[int]:
        hits: List[int] = []
        for h in hashes:
            bid = self.cached.get(h)
            if bid is None:
                break
            hits.append(self.gpu.fork(bid))  # clean: near miss, the list goes to the caller even after the break
        return hits

    def admit(self, seq_id: int, hashes: Sequence[int], num_tokens: int) -> bool:
        assert seq_id not in self.tables
        hits = self.lookup_prefix(hashes)  # leak: return False drops the forked hits
        missing = self._blocks_for(num_tokens) - len(hits)
        if missing > self.gpu.num_free - self.watermark:
            logger.debug("seq %d: %d blocks short", seq_id, missing)
            return False
        table = list(hits)
        for _ in range(missing):
            table.append(self.gpu.allocate())  # clean: stored in the table, capacity was checked
        self.tables[seq_id] = table
        return True

    def admit_chunk(self, seq_id: int, hashes: Sequence[int], num_tokens: int) -> bool:
        assert seq_id not in self.tables
        table = self.lookup_prefix(hashes)  # clean: near miss, given back when the allocation falls short
        try:
            while len(table) * self.block_size < num_tokens:
                table.append(self.gpu.allocate())  # clean: near miss, the handler frees what is in the table
        except OutOfBlocks:
            for bid in reversed(table):
                self.gpu.free(bid)
            return False
        self.tables[seq_id] = table
        return True

    # -- decode --------------------------------------------------------

    def append_slot(self, seq_id: int, num_tokens: int) -> Optional[Tuple[int, int]]:
        table = self.tables[seq_id]
        if len(table) * self.block_size < num_tokens:
            table.append(self.gpu.allocate())  # clean: appended to the sequence's table
            return None
        last = table[-1]
        if self.gpu.refcount(last) == 1:
            return None
        fresh = self.gpu.allocate()  # clean: takes the place of the freed share
        self.gpu.free(last)
        table[-1] = fresh
        return last, fresh

    def fork_sequence(self, parent: int, child: int) -> None:
        assert child not in self.tables
        self.tables[child] = [self.gpu.fork(b) for b in self.tables[parent]]  # clean: owned by the child's table

    def lookahead(self, seq_id: int, k: int) -> List[int]:
        """Blocks for k speculative tokens; given to the sequence if they fit."""
        table = self.tables[seq_id]
        extra: List[int] = []
        need = self._blocks_for(k)
        while len(extra) < need:
            bid = self.gpu.try_allocate()  # clean: near miss, partial result is kept in the table
            if bid is None:
                break
            extra.append(bid)
        table.extend(extra)
        return extra

    # -- prefix cache --------------------------------------------------

    def publish(self, seq_id: int, hashes: Sequence[int]) -> None:
        for h, bid in zip(hashes, self.tables[seq_id]):
            self.cached[h] = self.gpu.fork(bid)  # leak: a hash published before loses its entry's reference

    def evict(self, h: int) -> bool:
        bid = self.cached.pop(h, None)
        if bid is None:
            return False
        self.gpu.free(bid)
        return True

    # -- swap ----------------------------------------------------------

    def swap_out(self, seq_id: int) -> Optional[List[Tuple[int, int]]]:
        mapping: List[Tuple[int, int]] = []
        for gpu_bid in self.tables[seq_id]:
            cpu_bid = self.cpu.try_allocate()  # leak: swap_in pops the cpu table and returns without it when the GPU is full
            if cpu_bid is None:
                for _, taken in mapping:
                    self.cpu.free(taken)
                return None
            mapping.append((gpu_bid, cpu_bid))
        for gpu_bid, _ in mapping:
            self.gpu.free(gpu_bid)
        del self.tables[seq_id]
        self.swapped[seq_id] = [c for _, c in mapping]
        return mapping

    def swap_in(self, seq_id: int) -> Optional[List[Tuple[int, int]]]:
        cpu_table = self.swapped.pop(seq_id, None)
        if cpu_table is None:
            return None
        if len(cpu_table) > self.gpu.num_free - self.watermark:
            return None
        mapping = []
        table = []
        for cpu_bid in cpu_table:
            gpu_bid = self.gpu.allocate()  # clean: capacity checked, stored in the table
            table.append(gpu_bid)
            mapping.append((cpu_bid, gpu_bid))
            self.cpu.free(cpu_bid)
        self.tables[seq_id] = table
        return mapping

    def free_sequence(self, seq_id: int) -> None:
        for bid in reversed(self.tables.pop(seq_id, [])):
            self.gpu.free(bid)
        for bid in self.swapped.pop(seq_id, []):
            self.cpu.free(bid)
