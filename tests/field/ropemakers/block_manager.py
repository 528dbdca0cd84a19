"""Paged KV cache block manager: device and host pools, sequence tables, copy on write."""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional, Tuple

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Block:
    idx: int
    refs: int = 0
    tokens: int = 0


@dataclass
class Sequence:
    seq_id: int
    length: int
    finished: bool = False
    sliding_window: Optional[int] = None
    extra: List[Block] = field(default_factory=list)


class NoFreeBlocks(RuntimeError):
    pass


class BlockPool:
    def __init__(self, count: int, block_size: int):
        self.block_size = block_size
        self._free: Deque[Block] = collections.deque(Block(i) for i in range(count))

    @property
    def available(self) -> int:
        return len(self._free)

    def carve(self) -> Optional[Block]:
        if not self._free:
            return None
        blk = self._free.popleft()
        blk.refs = 1
        blk.tokens = 0
        return blk

    def carve_many(self, n: int) -> List[Block]:
        if n > len(self._free):
            raise NoFreeBlocks(n)
        out = [self._free.popleft() for _ in range(n)]
        for blk in out:
            blk.refs = 1
            blk.tokens = 0
        return out

    def share(self, blk: Block) -> Block:
        blk.refs += 1
        return blk

    def drop(self, blk: Block) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)

    def drop_all(self, blks: Iterable[Block]) -> None:
        for blk in blks:
            self.drop(blk)


class BlockManager:
    def __init__(self, device: BlockPool, host: BlockPool, watermark: int = 4):
        self.device = device
        self.host = host
        self.watermark = watermark
        self.tables: Dict[int, List[Block]] = {}
        self.swapped: Dict[int, List[Block]] = {}
        self.far_bank: set[int] = set()

    def _blocks_for(self, tokens: int) -> int:
        size = self.device.block_size
        return (tokens + size - 1) // size

    # ---- admission -------------------------------------------------------

    def allocate(self, seq: Sequence) -> None:
        if seq.seq_id in self.tables:
            raise KeyError(f"sequence {seq.seq_id} already has a table")
        need = self._blocks_for(seq.length)
        blocks = self.device.carve_many(need)  # clean: put in self.tables, which free() empties
        self.tables[seq.seq_id] = blocks

    def allocate_incremental(self, seq: Sequence) -> bool:
        need = self._blocks_for(seq.length)
        got: List[Block] = []
        while len(got) < need:
            blk = self.device.carve()  # leak: blocks gathered so far are forgotten when the pool runs dry
            if blk is None:
                log.debug("seq %d: only %d of %d blocks", seq.seq_id, len(got), need)
                return False
            got.append(blk)
        self.tables.setdefault(seq.seq_id, []).extend(got)
        return True

    def can_grow(self, seq: Sequence) -> bool:
        if seq.finished:
            return False
        blk = self.device.carve()  # clean: dropped at once, a probe only
        if blk is None:
            return False
        self.device.drop(blk)
        return True

    def can_swap_in(self, seq: Sequence) -> bool:
        need = len(self.swapped.get(seq.seq_id, ()))
        if self.device.available < need + self.watermark:
            return False
        try:
            probe = self.device.carve_many(need)  # leak: the probe list is only measured
        except NoFreeBlocks:
            return False
        return len(probe) == need

    # ---- growth ----------------------------------------------------------

    def append_slot(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        """Make room for one token; returns (src, dst) if a block has to be copied."""
        table = self.tables[seq.seq_id]
        tail = table[-1]
        if tail.tokens == self.device.block_size:
            fresh = self.device.carve()  # clean: appended to the sequence's table
            if fresh is None:
                raise NoFreeBlocks(1)
            fresh.tokens = 1
            table.append(fresh)
            return None
        if tail.refs == 1:
            tail.tokens += 1
            return None
        copy = self.device.carve()  # clean: near miss, swapped for the shared tail in the table
        if copy is None:
            raise NoFreeBlocks(1)
        copy.tokens = tail.tokens + 1
        table[-1] = copy
        self.device.drop(tail)
        return tail.idx, copy.idx

    def carve_near(self) -> Optional[Block]:
        blk = self.device.carve()  # leak: a far-bank block is overwritten by the next one
        if blk is not None and blk.idx in self.far_bank:
            log.debug("block %d is in the far bank, trying another", blk.idx)
            blk = self.device.carve()  # clean: returned to the caller
        return blk

    def reserve_lookahead(self, seq: Sequence, k: int) -> int:
        need = self._blocks_for(seq.length + k) - len(self.tables[seq.seq_id])
        if need <= 0:
            return 0
        blocks = self.device.carve_many(need)  # leak: not kept when the window makes the lookahead moot
        if seq.sliding_window is not None and seq.length + k > seq.sliding_window:
            return 0
        seq.extra.extend(blocks)
        return need

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        keep = self._blocks_for(seq.length + accepted) - len(self.tables[seq.seq_id])
        keep = max(0, min(keep, len(seq.extra)))
        self.tables[seq.seq_id].extend(seq.extra[:keep])
        self.device.drop_all(seq.extra[keep:])
        seq.extra = []

    # ---- sharing ---------------------------------------------------------

    def fork(self, parent: int, child: int) -> None:
        if child in self.tables:
            raise KeyError(child)
        table = []
        for blk in self.tables[parent]:
            table.append(self.device.share(blk))  # clean: the list becomes the child's table
        self.tables[child] = table

    def pin_prefix(self, parent: int, n: int) -> List[int]:
        ids = []
        for blk in self.tables[parent][:n]:
            if blk.tokens < self.device.block_size:
                break
            self.device.share(blk)  # leak: only the index is kept, the extra reference is never dropped
            ids.append(blk.idx)
        return ids

    # ---- swapping --------------------------------------------------------

    def swap_out(self, seq: Sequence) -> List[Tuple[int, int]]:
        table = self.tables[seq.seq_id]
        moved: List[Block] = []
        for _ in table:
            dst = self.host.carve()  # clean: near miss, rolled back when the host is full, else in self.swapped
            if dst is None:
                self.host.drop_all(moved)
                return []
            moved.append(dst)
        mapping = [(s.idx, d.idx) for s, d in zip(table, moved)]
        self.device.drop_all(self.tables.pop(seq.seq_id))
        self.swapped[seq.seq_id] = moved
        return mapping

    def swap_in(self, seq: Sequence) -> List[Tuple[int, int]]:
        host_blocks = self.swapped[seq.seq_id]
        blocks = self.device.carve_many(len(host_blocks))  # clean: becomes the table of the sequence
        self.tables[seq.seq_id] = blocks
        self.host.drop_all(self.swapped.pop(seq.seq_id))
        return [(h.idx, d.idx) for h, d in zip(host_blocks, blocks)]

    def defragment(self, seq: Sequence, copy_fn) -> int:
        table = self.tables[seq.seq_id]
        scratch_needed = len(table) > 1
        scratch = None
        if scratch_needed:
            scratch = self.device.carve()  # clean: near miss, dropped under the same guard below
            if scratch is None:
                return 0
        moved = sum(1 for a, b in zip(table, table[1:]) if b.idx < a.idx)
        if scratch_needed:
            copy_fn(table, scratch)
            self.device.drop(scratch)
        return moved

    def free(self, seq: Sequence) -> None:
        self.device.drop_all(self.tables.pop(seq.seq_id, ()))
        self.host.drop_all(self.swapped.pop(seq.seq_id, ()))
        self.device.drop_all(seq.extra)
        seq.extra = []
