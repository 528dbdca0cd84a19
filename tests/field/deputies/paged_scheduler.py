"""Continuous-batching scheduler on top of a paged KV block pool."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

logger = logging.getLogger(__name__)


class NoFreeBlocks(RuntimeError):
    pass


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def __len__(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        if n > len(self._free):
            raise NoFreeBlocks(f"want {n}, have {len(self._free)}")
        blocks = [self._free.popleft() for _ in range(n)]
        for b in blocks:
            self._refs[b] = 1
        return blocks

    def try_allocate_one(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def share(self, blocks: list[int]) -> list[int]:
        for b in blocks:
            self._refs[b] += 1
        return list(blocks)

    def refcount(self, block: int) -> int:
        return self._refs[block]

    def release(self, blocks: list[int]) -> None:
        for b in blocks:
            self._refs[b] -= 1
            if self._refs[b] == 0:
                self._free.append(b)


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    lookahead: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    status: Status = Status.WAITING


class CopyEngine:
    """Batched block copies between device and host; False when the ring is full."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.queue: deque[list[tuple[int, int]]] = deque()

    def submit(self, pairs: list[tuple[int, int]]) -> bool:
        if len(self.queue) >= self.depth:
            return False
        self.queue.append(pairs)
        return True

    def drain(self) -> None:
        self.queue.clear()


class Scheduler:
    def __init__(self, device: BlockPool, host: BlockPool, copier: CopyEngine, block_size: int = 16) -> None:
        self.device = device
        self.host = host
        self.copier = copier
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: dict[int, Sequence] = {}

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def admit(self) -> None:
        while self.waiting:
            seq = self.waiting[0]
            try:
                seq.blocks = self.device.allocate(self._blocks_for(len(seq.tokens)))  # clean: near miss, kept in seq.blocks (empty while waiting), released by _release_device
            except NoFreeBlocks:
                return
            self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        if seq.lookahead:
            return True
        if len(self.device) < k:
            return False
        seq.lookahead = self.device.allocate(k)  # leak: preempt() empties seq.lookahead without releasing it
        return True

    def append_token(self, seq: Sequence, token: int) -> bool:
        if len(seq.tokens) % self.block_size == 0:
            if seq.lookahead:
                seq.blocks.append(seq.lookahead.pop(0))
            else:
                block = self.device.try_allocate_one()  # clean: near miss, None is refused, otherwise appended to seq.blocks
                if block is None:
                    return False
                seq.blocks.append(block)
        seq.tokens.append(token)
        return True

    def fork(self, parent: Sequence, child_id: int) -> Sequence:
        child = Sequence(child_id, list(parent.tokens), status=Status.RUNNING)
        child.blocks = self.device.share(parent.blocks)  # clean: the child owns its references and is put among the running
        self.running.append(child)
        return child

    def copy_on_write(self, seq: Sequence) -> tuple[int, int] | None:
        last = seq.blocks[-1]
        if self.device.refcount(last) == 1:
            return None
        fresh = self.device.try_allocate_one()  # leak: it replaces seq.blocks[-1], whose reference is never dropped
        if fresh is None:
            raise NoFreeBlocks("copy-on-write")
        seq.blocks[-1] = fresh
        return last, fresh

    def decode_step(self, sampled: dict[int, int]) -> None:
        copies: list[tuple[int, int]] = []
        for seq in list(self.running):
            pair = self.copy_on_write(seq)
            if pair is not None:
                copies.append(pair)
            if not self.append_token(seq, sampled[seq.seq_id]):
                self.preempt(seq)
        if copies:
            self.copier.submit(copies)
            self.copier.drain()

    def swap_out(self, seq: Sequence) -> bool:
        if len(self.host) < len(seq.blocks):
            return False
        dst = self.host.allocate(len(seq.blocks))  # leak: not given back when the copy ring is full
        if not self.copier.submit(list(zip(seq.blocks, dst))):
            logger.debug("copy ring full, seq %d stays", seq.seq_id)
            return False
        seq.host_blocks = dst
        self._release_device(seq)
        self.running.remove(seq)
        seq.status = Status.SWAPPED
        self.swapped[seq.seq_id] = seq
        return True

    def swap_in(self, seq: Sequence) -> bool:
        try:
            dst = self.device.allocate(len(seq.host_blocks))  # clean: near miss, released when the copy ring is full, else moved into seq.blocks
        except NoFreeBlocks:
            return False
        if not self.copier.submit(list(zip(seq.host_blocks, dst))):
            self.device.release(dst)
            return False
        seq.blocks = dst
        self.host.release(seq.host_blocks)
        seq.host_blocks = []
        del self.swapped[seq.seq_id]
        seq.status = Status.RUNNING
        self.running.append(seq)
        return True

    def _release_device(self, seq: Sequence) -> None:
        self.device.release(seq.blocks)
        self.device.release(seq.lookahead)
        seq.blocks = []
        seq.lookahead = []

    def preempt(self, seq: Sequence) -> None:
        self.device.release(seq.blocks)
        seq.blocks = []
        seq.lookahead = []
        seq.status = Status.WAITING
        self.running.remove(seq)
        self.waiting.appendleft(seq)

    def finish(self, seq: Sequence) -> None:
        self._release_device(seq)
        seq.status = Status.FINISHED
        self.running.remove(seq)

    def abort(self, seq_id: int) -> None:
        if seq_id in self.swapped:
            seq = self.swapped.pop(seq_id)
            self.host.release(seq.host_blocks)
            seq.host_blocks = []
            return
        for seq in self.running:
            if seq.seq_id == seq_id:
                self.finish(seq)
                return
        self.waiting = deque(s for s in self.waiting if s.seq_id != seq_id)

    def profile(self, lengths: list[int]) -> int:
        """Dry run that reports how many of the given lengths fit at once."""
        held: list[list[int]] = []
        for n in lengths:
            need = self._blocks_for(n)
            if need > len(self.device):
                break
            held.append(self.device.allocate(need))  # clean: near miss, every list in held is released after the loop, break included
        for blocks in held:
            self.device.release(blocks)
        return len(held)
