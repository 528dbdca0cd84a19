from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Optional

from .blocks import BlockAllocator, SwapSpace


@dataclass
class SeqState:
    rid: str
    prompt_len: int
    max_tokens: int
    generated: int = 0
    blocks: list[int] = field(default_factory=list)
    cross_blocks: list[int] = field(default_factory=list)
    swap: list[int] = field(default_factory=list)
    sample_slot: Optional[int] = None


class SampleSlots:
    def __init__(self, count: int) -> None:
        self._free: deque[int] = deque(range(count))

    def take_slot(self) -> Optional[int]:
        return self._free.popleft() if self._free else None

    def put_slot(self, slot: int) -> None:
        self._free.append(slot)


class Scheduler:
    def __init__(self, gpu: BlockAllocator, swap: SwapSpace, slots: SampleSlots, block_size: int) -> None:
        self.gpu = gpu
        self.swap = swap
        self.slots = slots
        self.block_size = block_size
        self.waiting: deque[SeqState] = deque()
        self.running: list[SeqState] = []
        self.swapped: deque[SeqState] = deque()

    def _admit(self, seq: SeqState) -> bool:
        need = -(-seq.prompt_len // self.block_size)
        blocks = self.gpu.allocate_n(need)  # clean: near miss, released when no sample slot is left and otherwise the sequence's
        if blocks is None:
            return False
        slot = self.slots.take_slot()  # leak: finish() and abort() put it back, preemption does not and re-admission takes another
        if slot is None:
            self.gpu.release_all(blocks)
            return False
        seq.blocks, seq.sample_slot = blocks, slot
        return True

    def add_cross(self, seq: SeqState, n: int) -> bool:
        blocks = self.gpu.allocate_n(n)  # leak: abort() of a running sequence gives back its own blocks and forgets the cross blocks
        if blocks is None:
            return False
        seq.cross_blocks.extend(blocks)
        return True

    def grow(self, seq: SeqState) -> bool:
        if seq.prompt_len + seq.generated < len(seq.blocks) * self.block_size:
            return True
        block = self.gpu.allocate()  # clean: near miss, None is no holding and a block is appended to the sequence
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def schedule(self) -> list[SeqState]:
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            if not self.grow(seq):
                self.preempt(seq)
        return list(self.running)

    def preempt(self, seq: SeqState) -> None:
        self.running.remove(seq)
        self.gpu.release_all(seq.blocks)
        seq.generated = 0
        self.waiting.appendleft(seq)

    def swap_out(self, seq: SeqState) -> bool:
        slots = self.swap.reserve(len(seq.blocks))  # clean: near miss, kept in seq.swap, which swap_in and abort release
        if not slots:
            return False
        seq.swap = slots
        self.gpu.release_all(seq.blocks)
        self.running.remove(seq)
        self.swapped.append(seq)
        return True

    def swap_in(self) -> Optional[SeqState]:
        if not self.swapped:
            return None
        seq = self.swapped[0]
        blocks = self.gpu.allocate_n(len(seq.swap))  # clean: near miss, moves into seq.blocks, which swap_out had emptied
        if blocks is None:
            return None
        self.swapped.popleft()
        self.swap.release(seq.swap)
        seq.swap, seq.blocks = [], blocks
        self.running.append(seq)
        return seq

    def abort(self, rid: str) -> bool:
        for seq in self.running:
            if seq.rid == rid:
                self.running.remove(seq)
                self.gpu.release_all(seq.blocks)
                self._put_slot(seq)
                return True
        for seq in self.swapped:
            if seq.rid == rid:
                self.swapped.remove(seq)
                self.swap.release(seq.swap)
                self._put_slot(seq)
                return True
        return False

    def _put_slot(self, seq: SeqState) -> None:
        if seq.sample_slot is not None:
            self.slots.put_slot(seq.sample_slot)
            seq.sample_slot = None

    def finish(self, seq: SeqState) -> None:
        self.running.remove(seq)
        self.gpu.release_all(seq.blocks)
        self.gpu.release_all(seq.cross_blocks)
        self._put_slot(seq)
