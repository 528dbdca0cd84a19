"""Paged key/value cache for a decoder: block allocator with reference counts, and the sequence scheduler."""
from __future__ import annotations

import enum
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int):
        self._free: List[int] = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        """A block with one reference, or None when there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def fork(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate_run(self, count: int) -> Optional[List[int]]:
        run: List[int] = []
        for _ in range(count):
            block = self.allocate()  # clean: returned in the run, or freed when the run is short
            if block is None:
                for taken in run:
                    self.free(taken)
                return None
            run.append(block)
        return run


class State(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    state: State = State.WAITING
    table: List[int] = field(default_factory=list)
    draft_block: Optional[int] = None
    host_blocks: List[int] = field(default_factory=list)


class CacheEngine:
    """Device copies; stands for the kernels."""

    def __init__(self) -> None:
        self.copies: List[tuple] = []

    def copy(self, src: int, dst: int) -> None:
        self.copies.append((src, dst))


class Scheduler:
    def __init__(self, gpu: BlockAllocator, cpu: BlockAllocator, engine: CacheEngine, block_size: int = 16):
        self.gpu = gpu
        self.cpu = cpu
        self.engine = engine
        self.block_size = block_size
        self.waiting: Deque[Sequence] = deque()
        self.running: Dict[int, Sequence] = {}
        self._ids = itertools.count()
        self._system_prompt: List[int] = []

    def add(self, tokens: Iterable[int]) -> Sequence:
        seq = Sequence(next(self._ids), list(tokens))
        self.waiting.append(seq)
        return seq

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self) -> Optional[Sequence]:
        if not self.waiting:
            return None
        seq = self.waiting[0]
        run = self.gpu.allocate_run(self._blocks_for(len(seq.tokens)))  # clean: becomes the table, see finish
        if run is None:
            return None
        self.waiting.popleft()
        seq.table = run
        seq.state = State.RUNNING
        self.running[seq.seq_id] = seq
        return seq

    def admit_chunked(self, seq: Sequence, chunk: int) -> bool:
        """Blocks for the first chunk of a long prompt."""
        need = self._blocks_for(min(chunk, len(seq.tokens)))
        fresh: List[int] = []
        while len(fresh) < need:
            block = self.gpu.allocate()  # leak: blocks gathered so far are dropped when the pool runs dry
            if block is None:
                return False
            fresh.append(block)
        seq.table.extend(fresh)
        seq.state = State.RUNNING
        self.running[seq.seq_id] = seq
        return True

    def append_slot(self, seq: Sequence) -> bool:
        """Room for one more token, with copy on write for a shared last block."""
        if len(seq.tokens) % self.block_size == 0:
            block = self.gpu.allocate()  # clean: put on the table, freed by finish
            if block is None:
                return False
            seq.table.append(block)
            return True
        last = seq.table[-1]
        if self.gpu.refs(last) == 1:
            return True
        own = self.gpu.allocate()  # clean: takes the place of the shared block in the table
        if own is None:
            return False
        self.engine.copy(last, own)
        seq.table[-1] = own
        self.gpu.free(last)
        return True

    def fork(self, parent: Sequence) -> Sequence:
        child = Sequence(next(self._ids), list(parent.tokens), State.RUNNING)
        child.table = [self.gpu.fork(b) for b in parent.table]  # clean: finish frees those of the child
        self.running[child.seq_id] = child
        return child

    def fork_trial(self, parent: Sequence, budget: int) -> Optional[Sequence]:
        trial = Sequence(next(self._ids), list(parent.tokens), State.RUNNING)
        for block in parent.table:
            trial.table.append(self.gpu.fork(block))  # leak: references dropped when over the budget
        if len(trial.table) > budget:
            return None
        self.running[trial.seq_id] = trial
        return trial

    def begin_draft(self, seq: Sequence) -> bool:
        """A side block for speculative tokens; called once a decoding step."""
        seq.draft_block = self.gpu.allocate()  # leak: the block of a rejected draft is overwritten
        return seq.draft_block is not None

    def end_draft(self, seq: Sequence, accepted: bool) -> None:
        if not accepted:
            seq.tokens = seq.tokens[: len(seq.table) * self.block_size]
            return
        if seq.draft_block is not None:
            seq.table.append(seq.draft_block)
            seq.draft_block = None

    def swap_out(self, seq: Sequence) -> bool:
        host = self.cpu.allocate_run(len(seq.table))  # clean: host_blocks, freed by swap_in and finish
        if host is None:
            return False
        for src, dst in zip(seq.table, host):
            self.engine.copy(src, dst)
            self.gpu.free(src)
        seq.table = []
        seq.host_blocks = host
        seq.state = State.SWAPPED
        return True

    def swap_in(self, seq: Sequence) -> bool:
        table = self.gpu.allocate_run(len(seq.host_blocks))  # clean: becomes the table
        if table is None:
            return False
        for src, dst in zip(seq.host_blocks, table):
            self.engine.copy(src, dst)
            self.cpu.free(src)
        seq.host_blocks = []
        seq.table = table
        seq.state = State.RUNNING
        return True

    def defragment(self, seq: Sequence) -> int:
        """Moves the blocks of a sequence to lower numbers; returns how many moved."""
        moved = 0
        for i, old in enumerate(seq.table):
            new = self.gpu.allocate()  # leak: a block that is not lower is left behind by continue
            if new is None:
                break
            if new >= old:
                continue
            self.engine.copy(old, new)
            seq.table[i] = new
            self.gpu.free(old)
            moved += 1
        return moved

    def compact_tail(self, seq: Sequence) -> bool:
        new = self.gpu.allocate()  # clean: near miss, freed itself when it is no better than the old one
        if new is None:
            return False
        old = seq.table[-1]
        better = new < old
        if better:
            self.engine.copy(old, new)
            seq.table[-1] = new
        self.gpu.free(old if better else new)
        return better

    def pin_system_prompt(self, seq: Sequence, blocks: int) -> None:
        for block in seq.table[:blocks]:
            self._system_prompt.append(self.gpu.fork(block))  # clean: near miss, unpin_system_prompt frees

    def unpin_system_prompt(self) -> None:
        while self._system_prompt:
            self.gpu.free(self._system_prompt.pop())

    def finish(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        for block in seq.table:
            self.gpu.free(block)
        for block in seq.host_blocks:
            self.cpu.free(block)
        seq.table = []
        seq.host_blocks = []
        seq.state = State.DONE
