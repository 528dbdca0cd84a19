"""Paged KV block bookkeeping: arena, block tables, copy-on-write, compaction."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Iterable, List, Optional, Sequence

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class Block:
    idx: int
    refs: int = 0
    filled: int = 0


class BlockArena:
    """Fixed set of KV blocks with reference counts."""

    def __init__(self, count: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free: Deque[Block] = deque(Block(i) for i in range(count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def grab(self) -> Optional[Block]:
        if not self._free:
            return None
        blk = self._free.popleft()
        blk.refs = 1
        return blk

    def share(self, blk: Block) -> Block:
        blk.refs += 1
        return blk

    def drop(self, blk: Block) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            blk.filled = 0
            self._free.append(blk)

    def grab_run(self, n: int) -> Optional[List[Block]]:
        run: List[Block] = []
        for _ in range(n):
            blk = self.grab()  # clean: the run is dropped on shortage and returned otherwise
            if blk is None:
                for b in run:
                    self.drop(b)
                return None
            run.append(blk)
        return run

    def grab_exact(self, n: int, low_water: int = 0) -> List[Block]:
        run: List[Block] = []
        while len(run) < n:
            if self.free_count <= low_water:
                raise OutOfBlocks(f"wanted {n}, got {len(run)}")
            run.append(self.grab())  # leak: blocks already in run are lost when the low water mark raises
        return run


class BlockTables:
    def __init__(self, arena: BlockArena, max_blocks: int, copier: Callable[[int, int], None]) -> None:
        self.arena = arena
        self.max_blocks = max_blocks
        self.copier = copier
        self.tables: Dict[int, List[Block]] = {}
        self.reserve: List[Block] = []

    def _blocks_for(self, ntokens: int) -> int:
        return -(-ntokens // self.arena.block_size)

    def open(self, seq_id: int, ntokens: int) -> bool:
        if seq_id in self.tables:
            raise KeyError(seq_id)
        run = self.arena.grab_run(self._blocks_for(ntokens))  # clean: moved into tables, which close() drops
        if run is None:
            return False
        self.tables[seq_id] = run
        return True

    def append_slot(self, seq_id: int) -> bool:
        table = self.tables[seq_id]
        if table and table[-1].filled < self.arena.block_size:
            table[-1].filled += 1
            return True
        blk = self.arena.grab()  # leak: not dropped when the table is at its limit
        if blk is None:
            return False
        if len(table) >= self.max_blocks:
            logger.warning("seq %d is at max length", seq_id)
            return False
        blk.filled = 1
        table.append(blk)
        return True

    def append_urgent(self, seq_id: int) -> bool:
        table = self.tables[seq_id]
        if len(table) >= self.max_blocks:
            return False
        blk = self.arena.grab()  # clean: near miss, the second source is used only when this is None
        if blk is None:
            if not self.reserve:
                return False
            blk = self.reserve.pop()
        blk.filled = 1
        table.append(blk)
        return True

    def fork(self, parent: int, child: int) -> None:
        assert child not in self.tables
        self.tables[child] = [self.arena.share(b) for b in self.tables[parent]]  # clean: held by the child's table

    def fork_tail(self, parent: int, child: int, keep: int) -> bool:
        src = self.tables[parent]
        head = [self.arena.share(b) for b in src[:keep]]  # leak: the shared counts stay when there is no tail block
        tail = self.arena.grab()  # clean: goes into the child's table
        if tail is None:
            return False
        if keep < len(src):
            self.copier(src[keep].idx, tail.idx)
            tail.filled = src[keep].filled
        self.tables[child] = head + [tail]
        return True

    def writable(self, seq_id: int, pos: int) -> Block:
        table = self.tables[seq_id]
        old = table[pos]
        if old.refs == 1:
            return old
        fresh = self.arena.grab()  # clean: near miss, takes the place of old, which is dropped
        if fresh is None:
            raise OutOfBlocks("copy on write")
        self.copier(old.idx, fresh.idx)
        fresh.filled = old.filled
        table[pos] = fresh
        self.arena.drop(old)
        return fresh

    def compact(self, seq_ids: Iterable[int], threshold: int) -> int:
        moved = 0
        for sid in seq_ids:
            table = self.tables.get(sid)
            if not table:
                continue
            for pos, blk in enumerate(table):
                if blk.idx < threshold:
                    continue
                target = self.arena.grab()  # leak: continue skips the drop when the target is no lower
                if target is None:
                    return moved
                if target.idx >= blk.idx:
                    continue
                self.copier(blk.idx, target.idx)
                target.filled = blk.filled
                table[pos] = target
                self.arena.drop(blk)
                moved += 1
        return moved

    def relocate(self, seq_id: int, pos: int, limit: int) -> bool:
        table = self.tables[seq_id]
        target = self.arena.grab()  # clean: dropped above the limit, else placed in the table
        if target is None:
            return False
        if target.idx >= limit:
            self.arena.drop(target)
            return False
        self.copier(table[pos].idx, target.idx)
        old, table[pos] = table[pos], target
        self.arena.drop(old)
        return True

    def first_aligned(self, align: int) -> Optional[Block]:
        blk = self.arena.grab()  # leak: overwritten in the loop when it is not aligned
        while blk is not None and blk.idx % align:
            blk = self.arena.grab()  # leak: each misaligned block is overwritten by the next
        return blk

    def aligned_or_none(self, align: int) -> Optional[Block]:
        skipped: List[Block] = []
        found = None
        while found is None:
            blk = self.arena.grab()  # clean: near miss, misaligned ones are gathered and dropped below
            if blk is None:
                break
            if blk.idx % align:
                skipped.append(blk)
            else:
                found = blk
        for blk in skipped:
            self.arena.drop(blk)
        return found

    def top_up_reserve(self, n: int) -> None:
        while len(self.reserve) < n:
            blk = self.arena.grab()  # clean: kept in reserve, which shutdown() empties
            if blk is None:
                break
            self.reserve.append(blk)

    def with_scratch(self, n: int, kernel: Callable[[Sequence[int]], None]) -> None:
        run = self.arena.grab_exact(n, low_water=4)  # clean: dropped in finally
        try:
            kernel([b.idx for b in run])
        finally:
            for blk in run:
                self.arena.drop(blk)

    def close(self, seq_id: int) -> None:
        for blk in self.tables.pop(seq_id, ()):
            self.arena.drop(blk)

    def shutdown(self) -> None:
        for sid in list(self.tables):
            self.close(sid)
        while self.reserve:
            self.arena.drop(self.reserve.pop())
