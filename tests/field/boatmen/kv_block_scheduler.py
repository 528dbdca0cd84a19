"""Continuous batching over a paged KV cache, with forks, swapping and preemption."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16

class OutOfBlocks(RuntimeError):
    pass

class BlockPool:
    """Reference counted block ids. A block is free again when its count is zero."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks
        self.num_blocks = num_blocks

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise OutOfBlocks("no device block left")
        block = self._free.popleft()  # clean: returned to the caller with a count of one
        self._refs[block] = 1
        return block

    def take_many(self, n: int) -> list[int]:
        got: list[int] = []
        while len(got) < n:
            if not self._free:
                raise OutOfBlocks(f"wanted {n}, found {len(got)}")
            block = self._free.popleft()  # leak: blocks popped so far are dropped when the list runs dry and OutOfBlocks is raised
            self._refs[block] = 1
            got.append(block)
        return got

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def give(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def give_all(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.give(block)

class HostSlots:
    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def claim(self) -> Optional[int]:
        if not self._free:
            return None
        return self._free.pop()  # clean: handed to the caller

    def unclaim(self, slot: int) -> None:
        self._free.append(slot)

@contextmanager
def scratch_blocks(pool: BlockPool, n: int) -> Iterator[list[int]]:
    blocks = pool.take_many(n)  # clean: the finally below gives them back
    try:
        yield blocks
    finally:
        pool.give_all(blocks)

@dataclass
class Sequence:
    seq_id: str
    prompt: list[int]
    max_new: int = 256
    blocks: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    cancelled: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.out)

    def blocks_needed(self) -> int:
        return -(-self.length // BLOCK_TOKENS)

class Scheduler:
    def __init__(self, pool: BlockPool, host: HostSlots, runner, max_running: int = 64) -> None:
        self.pool = pool
        self.host = host
        self.runner = runner
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: OrderedDict[str, Sequence] = OrderedDict()
        self.swapped: dict[str, tuple[Sequence, list[int]]] = {}
        self._system_blocks: list[int] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def set_system_prompt(self, tokens: list[int]) -> None:
        """May be called again whenever the operator edits the prompt."""
        self._system_blocks = self.pool.take_many(-(-len(tokens) // BLOCK_TOKENS))  # leak: the second call rebinds the list and the old blocks are forgotten
        self.runner.prefill(tokens, self._system_blocks)

    def calibrate(self) -> float:
        """Times one empty pass over four blocks."""
        with scratch_blocks(self.pool, 4) as blocks:  # clean: given back by the context manager
            t0 = time.perf_counter()
            self.runner.prefill([0] * (4 * BLOCK_TOKENS), blocks)
            return time.perf_counter() - t0

    def step(self) -> list[Sequence]:
        self._admit()
        batch: list[Sequence] = []
        for seq in list(self.running.values()):
            if seq.seq_id not in self.running:
                continue  # preempted by a neighbour in this very step
            if seq.cancelled:
                self.abort(seq.seq_id)
                continue
            if seq.blocks_needed() > len(seq.blocks) and not self._grow(seq):
                continue
            self._make_writable(seq, len(seq.blocks) - 1)
            batch.append(seq)
        return [s for s in batch if s.seq_id in self.running]

    def finish(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        self.pool.give_all(seq.blocks)
        seq.blocks = []

    def abort(self, seq_id: str) -> None:
        if seq_id in self.running:
            self.finish(self.running[seq_id])
        elif seq_id in self.swapped:
            seq, _ = self.swapped.pop(seq_id)
            seq.cancelled = True
        else:
            self.waiting = deque(s for s in self.waiting if s.seq_id != seq_id)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            need = seq.blocks_needed()
            if need > self.pool.available:
                break
            self.waiting.popleft()
            blocks = self.pool.take_many(need)  # leak: a cancelled sequence is skipped after its blocks were taken
            if seq.cancelled:
                logger.info("%s cancelled before its first step", seq.seq_id)
                continue
            seq.blocks = blocks
            self.runner.prefill(seq.prompt, blocks)
            self.running[seq.seq_id] = seq

    def _grow(self, seq: Sequence) -> bool:
        while True:
            try:
                block = self.pool.take()  # clean: near miss, appended to the sequence, finish or _preempt gives it back
            except OutOfBlocks:
                victim = self._pick_victim(seq)
                if victim is None:
                    self._preempt(seq)
                    return False
                if not self.swap_out(victim):
                    self._preempt(victim)
                continue
            seq.blocks.append(block)
            return True

    def _make_writable(self, seq: Sequence, index: int) -> None:
        old = seq.blocks[index]
        if not self.pool.is_shared(old):
            return
        try:
            fresh = self.pool.take()  # clean: near miss, takes the place of the old block whose count is lowered
        except OutOfBlocks:
            self._preempt(seq)
            return
        self.runner.copy_block(old, fresh)
        seq.blocks[index] = fresh
        self.pool.give(old)

    def _pick_victim(self, seq: Sequence) -> Optional[Sequence]:
        for other in reversed(self.running.values()):
            if other is not seq:
                return other
        return None

    def _preempt(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        self.pool.give_all(seq.blocks)
        seq.blocks = []
        self.waiting.appendleft(seq)

    def fork(self, parent: Sequence, child_id: str) -> Optional[Sequence]:
        child = Sequence(child_id, list(parent.prompt), parent.max_new)
        child.out = list(parent.out)
        child.blocks = [self.pool.share(b) for b in parent.blocks]  # leak: with a full batch the child is dropped along with its counts
        if len(self.running) >= self.max_running:
            return None
        self.running[child_id] = child
        return child

    def swap_out(self, seq: Sequence) -> bool:
        slots: list[int] = []
        for _ in seq.blocks:
            slot = self.host.claim()  # leak: abort() of a swapped sequence drops the table entry and never unclaims
            if slot is None:
                for s in slots:
                    self.host.unclaim(s)
                return False
            slots.append(slot)
        self.runner.copy_out(seq.blocks, slots)
        self.pool.give_all(seq.blocks)
        seq.blocks = []
        del self.running[seq.seq_id]
        self.swapped[seq.seq_id] = (seq, slots)
        return True

    def swap_in(self, seq_id: str) -> bool:
        seq, slots = self.swapped[seq_id]
        blocks: list[int] = []
        try:
            for _ in slots:
                blocks.append(self.pool.take())  # clean: near miss, a partial set is given back in the handler
        except OutOfBlocks:
            self.pool.give_all(blocks)
            return False
        self.runner.copy_in(slots, blocks)
        seq.blocks = blocks
        for slot in slots:
            self.host.unclaim(slot)
        del self.swapped[seq_id]
        self.running[seq_id] = seq
        return True

    def close(self) -> None:
        for seq in list(self.running.values()):
            self.finish(seq)
        for seq, slots in self.swapped.values():
            for slot in slots:
                self.host.unclaim(slot)
        self.swapped.clear()
        self.pool.give_all(self._system_blocks)
        self._system_blocks = []
