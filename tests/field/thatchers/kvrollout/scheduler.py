from collections import deque
from dataclasses import dataclass, field
from typing import Deque, List, Optional

from .blocks import BLOCK, Block, BlockManager


@dataclass(eq=False)
class Seq:
    uid: str
    tokens: List[int]
    max_len: int
    group: str = ""
    blocks: List[Block] = field(default_factory=list)
    draft: Optional[Block] = None

    def keys(self) -> List[int]:
        full = len(self.tokens) // BLOCK
        return [hash(tuple(self.tokens[: (i + 1) * BLOCK])) for i in range(full)]

    def blocks_needed(self) -> int:
        return -(-len(self.tokens) // BLOCK)


class Scheduler:
    def __init__(self, bm: BlockManager, max_running: int):
        self.bm = bm
        self.max_running = max_running
        self.waiting: Deque[Seq] = deque()
        self.running: List[Seq] = []

    def add(self, seq: Seq) -> None:
        self.waiting.append(seq)

    def schedule(self) -> List[Seq]:
        started: List[Seq] = []
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            cached = self.bm.match(seq.keys())  # leak: when the rest does not fit the loop breaks and the matched references stay
            fresh = self.bm.allocate(seq.blocks_needed() - len(cached))  # clean: in seq.blocks, freed by finish(), preempt() and abort()
            if fresh is None:
                break
            self.waiting.popleft()
            seq.blocks = cached + fresh
            self.running.append(seq)
            started.append(seq)
        return started

    def try_start(self, seq: Seq) -> bool:
        cached = self.bm.match(seq.keys())  # clean: near miss, freed when the allocation is refused
        fresh = self.bm.allocate(seq.blocks_needed() - len(cached))  # clean: owned by the sequence
        if fresh is None:
            self.bm.free(cached)
            return False
        seq.blocks = cached + fresh
        self.running.append(seq)
        return True

    def grow(self, seq: Seq) -> bool:
        if seq.blocks_needed() <= len(seq.blocks):
            return True
        block = self.bm.append_block()  # clean: near miss, appended to the list that every way out of running frees
        while block is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
            block = self.bm.append_block()  # clean: near miss, the loop asks again only after a refusal, so nothing is overwritten
        seq.blocks.append(block)
        return True

    def attach_draft(self, seq: Seq) -> bool:
        if seq.draft is None:
            seq.draft = self.bm.append_block()  # leak: preempt() frees the block list and clears the draft field
        return seq.draft is not None

    def _drop_draft(self, seq: Seq) -> None:
        if seq.draft is not None:
            self.bm.free([seq.draft])
            seq.draft = None

    def preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.bm.free(seq.blocks)
        seq.blocks = []
        seq.draft = None
        self.waiting.appendleft(seq)

    def finish(self, seq: Seq) -> None:
        self.running.remove(seq)
        for key, block in zip(seq.keys(), seq.blocks):
            self.bm.publish(key, block)
        self.bm.free(seq.blocks)
        seq.blocks = []
        self._drop_draft(seq)

    def abort(self, uid: str) -> bool:
        for seq in self.running:
            if seq.uid == uid:
                self.running.remove(seq)
                self.bm.free(seq.blocks)
                seq.blocks = []
                self._drop_draft(seq)
                return True
        return False
