"""Paged key/value cache scheduling for the decoder workers."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional

from pagedkv import BlockManager, OutOfBlocks

from serving.tokens import prefix_hash

log = logging.getLogger(__name__)


@dataclass
class Sequence:
    seq_id: int
    tokens: List[int]
    blocks: List[int] = field(default_factory=list)
    tail: Optional[int] = None
    done: bool = False


class Scheduler:
    def __init__(self, manager: BlockManager, block_size: int, watermark: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._watermark = watermark
        self._running: Dict[int, Sequence] = {}
        self._swapped: List[Sequence] = []
        self._shared: Dict[int, List[int]] = {}
        self._scratch: List[int] = []

    def _need(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self._block_size)

    def admit(self, seq: Sequence) -> bool:
        if seq.seq_id in self._running:
            return True
        need = self._need(seq)
        blocks = self._manager.alloc_blocks(need)  # clean: near miss, given back below the watermark, otherwise owned by the running sequence
        if self._manager.available < self._watermark:
            self._manager.free_blocks(blocks)
            return False
        seq.blocks = blocks
        self._running[seq.seq_id] = seq
        return True

    def admit_prefix(self, seq: Sequence) -> bool:
        key = prefix_hash(seq.tokens)
        blocks = self._manager.alloc_blocks(self._need(seq))  # leak: a prefix that is already shared returns without giving the new blocks back
        if key in self._shared:
            seq.blocks = list(self._shared[key])
            return True
        self._shared[key] = blocks
        return False

    def grow(self, seq_id: int) -> None:
        seq = self._running[seq_id]
        if len(seq.tokens) % self._block_size:
            return
        block = self._manager.alloc_block()  # clean: appended to the blocks of a running sequence
        seq.blocks.append(block)

    def speculate(self, seq_id: int, width: int) -> List[int]:
        """Reserve scratch blocks for draft tokens; accept() or reject() settles them."""
        if self._scratch:
            self._manager.free_blocks(self._scratch)
        self._scratch = self._manager.alloc_blocks(width)  # clean: near miss, the old scratch is freed first and reject, accept and shutdown settle it
        return [block * self._block_size for block in self._scratch]

    def accept(self, seq_id: int, count: int) -> None:
        seq = self._running[seq_id]
        taken, rest = self._scratch[:count], self._scratch[count:]
        self._scratch = []
        seq.blocks.extend(taken)
        if rest:
            self._manager.free_blocks(rest)

    def reject(self) -> None:
        self._manager.free_blocks(self._scratch)
        self._scratch = []

    def finish(self, seq_id: int) -> None:
        seq = self._running.pop(seq_id)
        seq.done = True
        self._manager.free_blocks(seq.blocks)
        seq.blocks = []

    def shutdown(self) -> None:
        for seq_id in list(self._running):
            self.finish(seq_id)
        for blocks in self._shared.values():
            self._manager.free_blocks(blocks)
        self._shared.clear()
        if self._scratch:
            self.reject()


class SwapSpace:
    """Host side blocks for sequences that were preempted."""

    def __init__(self, host: BlockManager) -> None:
        self._host = host
        self.parked = 0

    def park_all(self, seqs: List[Sequence]) -> int:
        parked = 0
        for seq in seqs:
            blocks = self._try_alloc(len(seq.blocks))  # leak: sequences that are done are skipped after the allocation
            if blocks is None:
                break
            if seq.done:
                continue
            self._host.copy_in(seq.blocks, blocks)
            self._host.free_blocks(blocks)
            parked += 1
        return parked

    def _try_alloc(self, count: int) -> Optional[List[int]]:
        try:
            return self._host.alloc_blocks(count)  # clean: returned to the caller
        except OutOfBlocks:
            log.warning("host swap space is full")
            return None


def fork(manager: BlockManager, parent: Sequence, child_id: int) -> Sequence:
    child = Sequence(child_id, list(parent.tokens))
    child.tail = manager.alloc_block()  # clean: returned in the child, see merge
    return child


def merge(manager: BlockManager, parent: Sequence, child_ids: List[int]) -> int:
    best = -1
    for child_id in child_ids:
        child = fork(manager, parent, child_id)  # clean: near miss, every arm settles the tail block
        if child.done:
            manager.free_block(child.tail)
            continue
        if len(child.tokens) > best:
            best = len(child.tokens)
        manager.free_block(child.tail)
    return best


def probe_capacity(manager: BlockManager, start: int) -> int:
    size = start
    while size > 0:
        try:
            blocks = manager.alloc_blocks(size)  # leak: the probed blocks are only counted and dropped
        except OutOfBlocks:
            size //= 2
            continue
        return len(blocks)
    return 0


def warm(manager: BlockManager, seqs: List[Sequence]) -> None:
    pair = manager.alloc_blocks(2)  # leak: only the first of the two blocks is freed
    for seq in seqs:
        manager.touch(pair[0], seq.seq_id)
        manager.touch(pair[1], seq.seq_id)
    manager.free_block(pair[0])
    spare = manager.alloc_block()  # clean: near miss, the number is copied and the copy freed
    keep = int(spare)
    manager.touch(keep, -1)
    manager.free_block(keep)
    tip = manager.alloc_blocks(1)  # clean: grafted into the shared tree of the manager
    manager.graft_blocks(root=0, blocks=tip)
