"""Continuous batching over a paged KV cache: admission, growth, swapping, preemption."""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterable, List, Optional

logger = logging.getLogger(__name__)


class BlockAllocator:
    """Fixed set of KV blocks. ``allocate`` answers None when it cannot serve the whole request."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: Deque[int] = collections.deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]

    def free(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)


@dataclass
class Sequence:
    seq_id: int
    prompt_len: int
    max_new: int = 64
    blocks: List[int] = field(default_factory=list)
    draft_blocks: List[int] = field(default_factory=list)
    host_blocks: List[int] = field(default_factory=list)
    generated: int = 0
    aborted: bool = False

    @property
    def length(self) -> int:
        return self.prompt_len + self.generated


class CopyEngine:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.queue: List[tuple] = []

    def has_room(self, n: int) -> bool:
        return len(self.queue) + n <= self.depth

    def submit(self, src: List[int], dst: List[int]) -> None:
        self.queue.extend(zip(src, dst))


class Scheduler:
    def __init__(self, gpu: BlockAllocator, host: BlockAllocator, draft: BlockAllocator,
                 copier: CopyEngine, max_running: int = 32) -> None:
        self.gpu = gpu
        self.host = host
        self.draft = draft
        self.copier = copier
        self.max_running = max_running
        self.waiting: Deque[Sequence] = collections.deque()
        self.running: List[Sequence] = []
        self.swapped: Dict[int, Sequence] = {}

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.gpu.block_size)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> List[Sequence]:
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            blocks = self.gpu.allocate(self._need(seq.length))  # clean: moved into the sequence, freed by finish or preempt
            if blocks is None:
                break
            self.waiting.popleft()
            seq.blocks = blocks
            self.running.append(seq)
        for seq in list(self.running):
            if seq in self.running and seq.length % self.gpu.block_size == 0:
                self._grow(seq)
        return list(self.running)

    def _grow(self, seq: Sequence) -> bool:
        while True:
            extra = self.gpu.allocate(1)  # clean: joins the sequence's blocks, and a None holds nothing
            if extra is not None:
                seq.blocks.extend(extra)
                return True
            victim = self._pick_victim(seq)
            if victim is None:
                return False
            self._preempt(victim)

    def _pick_victim(self, keep: Sequence) -> Optional[Sequence]:
        for cand in reversed(self.running):
            if cand is not keep:
                return cand
        return None

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.gpu.free(seq.blocks)
        seq.blocks = []
        self.waiting.appendleft(seq)

    def admit_burst(self, burst: List[Sequence]) -> int:
        """Side door for a burst of short prompts; skips the waiting queue."""
        admitted = 0
        for seq in burst:
            blocks = self.gpu.allocate(self._need(seq.length + seq.max_new))  # leak: continue on an aborted sequence drops the blocks
            if blocks is None:
                self.waiting.append(seq)
                continue
            if seq.aborted:
                logger.debug("seq %d aborted before admission", seq.seq_id)
                continue
            seq.blocks = blocks
            self.running.append(seq)
            admitted += 1
        return admitted

    def swap_out(self, seq: Sequence) -> bool:
        host = self.host.allocate(len(seq.blocks))  # leak: early return when the copy queue is full
        if host is None:
            return False
        if not self.copier.has_room(len(host)):
            return False
        self.copier.submit(seq.blocks, host)
        self.gpu.free(seq.blocks)
        self.draft.free(seq.draft_blocks)
        seq.blocks, seq.draft_blocks = [], []
        seq.host_blocks = host
        self.running.remove(seq)
        self.swapped[seq.seq_id] = seq
        return True

    def swap_in(self, seq_id: int) -> bool:
        seq = self.swapped[seq_id]
        dev = self.gpu.allocate(len(seq.host_blocks))  # leak: no rollback when the draft allocation fails
        if dev is None:
            return False
        draft = self.draft.allocate(self._need(seq.length))  # clean: moved into the sequence
        if draft is None:
            return False
        self.copier.submit(seq.host_blocks, dev)
        self.host.free(seq.host_blocks)
        seq.host_blocks = []
        seq.blocks, seq.draft_blocks = dev, draft
        del self.swapped[seq_id]
        self.running.append(seq)
        return True

    def admit_speculative(self, seq: Sequence) -> bool:
        target = self.gpu.allocate(self._need(seq.length))  # clean: rolled back or moved into the sequence
        if target is None:
            return False
        draft = self.draft.allocate(self._need(seq.length))  # clean: moved into the sequence
        if draft is None:
            self.gpu.free(target)
            return False
        seq.blocks, seq.draft_blocks = target, draft
        self.running.append(seq)
        return True

    def fork(self, parent: Sequence, width: int) -> List[Sequence]:
        children: List[Sequence] = []
        for i in range(width):
            blocks = self.gpu.allocate(len(parent.blocks))  # clean: near miss, the partial fan-out is unwound before the empty answer
            if blocks is None:
                for child in children:
                    self.gpu.free(child.blocks)
                return []
            children.append(Sequence(parent.seq_id * 100 + i, parent.length, blocks=blocks))
        self.running.extend(children)
        return children

    def can_fit(self, tokens: int) -> bool:
        probe = self.gpu.allocate(self._need(tokens))  # clean: near miss, freed whenever it is not None
        fits = probe is not None
        if fits:
            self.gpu.free(probe)
        return fits

    def warm_up(self, lengths: List[int]) -> None:
        dummy: Optional[List[int]] = None
        for n in lengths:
            dummy = self.gpu.allocate(self._need(n))  # leak: rebound by each turn, only the last one is freed
            if dummy is None:
                break
            self.copier.submit(dummy, dummy)
        if dummy is not None:
            self.gpu.free(dummy)
        self.copier.queue.clear()

    def finish(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        self.gpu.free(seq.blocks)
        self.draft.free(seq.draft_blocks)
        self.host.free(seq.host_blocks)
        seq.blocks, seq.draft_blocks, seq.host_blocks = [], [], []


def main() -> None:
    sched = Scheduler(BlockAllocator(64), BlockAllocator(64), BlockAllocator(32), CopyEngine(256))
    for i in range(4):
        sched.add(Sequence(i, prompt_len=20 + i))
    for seq in sched.schedule():
        seq.generated += 1
    first = sched.running[0]
    sched.swap_out(first)
    sched.swap_in(first.seq_id)
    assert sched.can_fit(32)
    for seq in sched.fork(sched.running[1], 2):
        sched.finish(seq)
    sched.warm_up([16, 32])
    for seq in list(sched.running):
        sched.finish(seq)


if __name__ == "__main__":
    main()
