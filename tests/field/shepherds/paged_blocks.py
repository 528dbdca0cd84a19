"""Paged KV cache bookkeeping: the block pool, per-sequence block tables, and the step planner.

Single threaded by design: everything here runs on the scheduler loop.
"""
from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

logger = logging.getLogger("serve.paged")


class OutOfBlocks(RuntimeError):
    pass


class BlockPool:
    """Fixed set of block ids with a reference count each."""

    def __init__(self, num_blocks: int, name: str = "device"):
        self.name = name
        self.num_blocks = num_blocks
        self._free: List[int] = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self.peak_used = 0

    def available(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        if not self._free:
            raise OutOfBlocks(f"{self.name}: 0 of {self.num_blocks} blocks free")
        block = self._free.pop()  # clean: handed to the caller
        self._refs[block] = 1
        self.peak_used = max(self.peak_used, self.num_blocks - len(self._free))
        return block

    def take_many(self, n: int) -> List[int]:
        if n > len(self._free):
            raise OutOfBlocks(f"{self.name}: wanted {n}, have {len(self._free)}")
        return [self.take() for _ in range(n)]  # clean: near miss, the count was checked first so take() cannot fail half-way

    def share(self, block: int) -> int:
        if self._refs[block] <= 0:
            raise ValueError(f"block {block} is not in use")
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)
        elif self._refs[block] < 0:
            raise ValueError(f"block {block} dropped twice")

    def drop_all(self, blocks: List[int]) -> None:
        for block in reversed(blocks):
            self.drop(block)


@dataclass
class Sequence:
    seq_id: int
    prompt_len: int
    max_tokens: int
    output: List[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_len + len(self.output)

    def finished(self, eos: int) -> bool:
        return len(self.output) >= self.max_tokens or (bool(self.output) and self.output[-1] == eos)


class BlockManager:
    def __init__(self, pool: BlockPool, host: BlockPool, block_size: int = 16, max_tables: int = 256):
        self.pool = pool
        self.host = host
        self.block_size = block_size
        self.max_tables = max_tables
        self.watermark = max(1, pool.num_blocks // 100)
        self.tables: Dict[int, List[int]] = {}
        self.host_tables: Dict[int, List[int]] = {}
        self.lookahead: Dict[int, List[int]] = {}
        self.pinned: Dict[str, List[int]] = {}
        self.copies: List[Tuple[int, int]] = []
        # padding rows of a CUDA graph write here
        self.pad_block = pool.take()  # clean: near miss, lives as long as the manager and close() drops it

    def close(self) -> None:
        for blocks in self.tables.values():
            self.pool.drop_all(blocks)
        self.tables.clear()
        for blocks in self.pinned.values():
            self.pool.drop_all(blocks)
        self.pinned.clear()
        self.pool.drop(self.pad_block)

    def admit(self, seq: Sequence) -> bool:
        need = math.ceil(seq.length / self.block_size)
        if self.pool.available() - need < self.watermark:
            return False
        self.tables[seq.seq_id] = self.pool.take_many(need)  # clean: owned by the table until release()
        return True

    def grow(self, seq: Sequence) -> None:
        table = self.tables[seq.seq_id]
        if seq.length <= len(table) * self.block_size:
            return
        table.append(self.pool.take())  # clean: goes into the table

    def release(self, seq: Sequence) -> None:
        blocks = self.tables.pop(seq.seq_id, None)
        if blocks is not None:
            self.pool.drop_all(blocks)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        shared = [self.pool.share(b) for b in self.tables[parent.seq_id]]  # leak: refused at max_tables after the references were taken
        if len(self.tables) >= self.max_tables:
            logger.warning("fork of %d refused, %d tables", parent.seq_id, len(self.tables))
            return False
        self.tables[child.seq_id] = shared
        return True

    def copy_on_write(self, seq: Sequence) -> Optional[Tuple[int, int]]:
        table = self.tables[seq.seq_id]
        last = table[-1]
        if self.pool.refs(last) == 1:
            return None
        table[-1] = self.pool.take()  # clean: near miss, the entry it replaces is dropped two lines on
        self.copies.append((last, table[-1]))
        self.pool.drop(last)
        return last, table[-1]

    def pin_prefix(self, name: str, seq: Sequence, tokens: int) -> int:
        full = tokens // self.block_size
        blocks = self.tables[seq.seq_id][:full]
        self.pinned[name] = [self.pool.share(b) for b in blocks]  # leak: pinning a name again overwrites the old references
        return full * self.block_size

    def unpin_prefix(self, name: str) -> None:
        self.pool.drop_all(self.pinned.pop(name, []))

    def swap_out(self, seq: Sequence) -> None:
        device = self.tables[seq.seq_id]
        host = self.host.take_many(len(device))  # leak: swap_in pops the host table and returns without dropping it when the device is full
        self.copies.extend(zip(device, host))
        self.host_tables[seq.seq_id] = host
        self.release(seq)

    def swap_in(self, seq: Sequence) -> bool:
        host = self.host_tables.pop(seq.seq_id, [])
        try:
            device = self.pool.take_many(len(host))  # clean: stored in the table below
        except OutOfBlocks:
            logger.info("seq %d stays swapped out", seq.seq_id)
            return False
        self.copies.extend(zip(host, device))
        self.tables[seq.seq_id] = device
        self.host.drop_all(host)
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        if seq.seq_id in self.lookahead:
            return True
        extra: List[int] = []
        try:
            while len(extra) < k:
                extra.append(self.pool.take())  # leak: a sequence released between reserve and commit stays in lookahead for good
        except OutOfBlocks:
            self.pool.drop_all(extra)
            return False
        self.lookahead[seq.seq_id] = extra
        return True

    def commit_lookahead(self, seq: Sequence, used: int) -> None:
        extra = self.lookahead.pop(seq.seq_id, [])
        self.tables[seq.seq_id].extend(extra[:used])
        self.pool.drop_all(extra[used:])

    def warmup(self, runner, shapes: List[int]) -> int:
        done = 0
        for n in shapes:
            if n > self.pool.available():
                break
            blocks = self.pool.take_many(n)  # leak: a shape that the runner does not support is skipped with its blocks
            if not runner.supports(n):
                logger.info("no graph for %d blocks", n)
                continue
            runner.capture(blocks, self.pad_block)
            self.pool.drop_all(blocks)
            done += 1
        return done

    def probe_bandwidth(self, runner, n: int) -> float:
        blocks = self.pool.take_many(n)  # clean: try/finally
        try:
            return runner.time_copy(blocks)
        finally:
            self.pool.drop_all(blocks)


class Planner:
    def __init__(self, manager: BlockManager, eos: int, lookahead: int = 0):
        self.manager = manager
        self.eos = eos
        self.k = lookahead
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []
        self.swapped: Deque[Sequence] = deque()

    def step(self) -> List[Sequence]:
        while self.swapped and self.manager.swap_in(self.swapped[0]):
            self.running.append(self.swapped.popleft())
        while self.waiting and self.manager.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        batch: List[Sequence] = []
        for seq in list(self.running):
            try:
                self.manager.grow(seq)
            except OutOfBlocks:
                self._preempt(seq)
                continue
            if self.k:
                self.manager.reserve_lookahead(seq, self.k)
            batch.append(seq)
        return batch

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if self.manager.host.available() >= len(self.manager.tables[seq.seq_id]):
            self.manager.swap_out(seq)
            self.swapped.append(seq)
        else:
            self.manager.release(seq)
            self.waiting.appendleft(seq)

    def on_tokens(self, seq: Sequence, tokens: List[int]) -> None:
        seq.output.extend(tokens)
        if seq.finished(self.eos):
            self.running.remove(seq)
            self.manager.release(seq)
            return
        self.manager.commit_lookahead(seq, math.ceil(len(tokens) / self.manager.block_size))
