"""Paged KV block manager and a small continuous-batching scheduler."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Optional


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, n: int) -> Optional[list[int]]:
        if len(self._free) < n:
            return None
        out = [self._free.popleft() for _ in range(n)]
        for block in out:
            self._refs[block] = 1
        return out

    def retain(self, block: int) -> None:
        self._refs[block] += 1

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def release_many(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.release(block)


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    IGNORED = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    seq_id: str
    tokens: list[int]
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Scheduler:
    def __init__(self, device: BlockAllocator, host: BlockAllocator, block_size: int = 16,
                 max_model_len: int = 4096, max_seqs: int = 64) -> None:
        self.device = device
        self.host = host
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_seqs = max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.done: list[Sequence] = []
        self._sink = device.allocate()  # clean: near miss, the padding block lives as long as the scheduler and close() releases it

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _release_seq(self, seq: Sequence) -> None:
        self.device.release_many(seq.blocks)
        seq.blocks = []

    def admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            blocks = self.device.allocate_many(self._blocks_for(seq.num_tokens))  # leak: a too long prompt is ignored by continue and its fresh blocks are dropped
            if blocks is None:
                break
            self.waiting.popleft()
            if seq.num_tokens > self.max_model_len:
                seq.status = Status.IGNORED
                self.done.append(seq)
                continue
            seq.blocks = blocks
            seq.status = Status.RUNNING
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def _ensure_slot(self, seq: Sequence) -> bool:
        if seq.num_tokens <= len(seq.blocks) * self.block_size:
            return True
        block = self.device.allocate()  # clean: appended to the sequence's table, which _release_seq gives back
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def reserve_lookahead(self, seq: Sequence, k: int) -> bool:
        missing = self._blocks_for(seq.num_tokens + k) - len(seq.blocks)
        extra: list[int] = []
        for _ in range(missing):
            block = self.device.allocate()  # leak: when a later one is None the earlier ones in extra are forgotten
            if block is None:
                return False
            extra.append(block)
        seq.blocks.extend(extra)
        return True

    def reserve_chunk(self, seq: Sequence, chunk: int) -> bool:
        missing = self._blocks_for(seq.num_tokens + chunk) - len(seq.blocks)
        extra: list[int] = []
        while len(extra) < missing:
            block = self.device.allocate()  # clean: near miss, on None everything taken so far is released
            if block is None:
                self.device.release_many(extra)
                return False
            extra.append(block)
        seq.blocks.extend(extra)
        return True

    def fork(self, parent: Sequence, child_id: str) -> Sequence:
        child = Sequence(child_id, list(parent.tokens), Status.RUNNING)
        for block in parent.blocks:
            self.device.retain(block)  # clean: the child's table owns the reference until _release_seq
            child.blocks.append(block)
        self.running.append(child)
        return child

    def copy_on_write(self, seq: Sequence) -> Optional[tuple[int, int]]:
        last = seq.blocks[-1]
        if self.device.ref_count(last) == 1:
            return None
        fresh = self.device.allocate()  # clean: near miss, it replaces the shared block whose reference is released
        if fresh is None:
            return None
        self.device.release(last)
        seq.blocks[-1] = fresh
        return last, fresh

    def extend_prompt(self, seq: Sequence, tokens: list[int]) -> bool:
        total = self._blocks_for(seq.num_tokens + len(tokens))
        if self.device.num_free < total:
            return False
        seq.tokens.extend(tokens)
        seq.blocks = self.device.allocate_many(total) or []  # leak: the table that the running sequence already held is overwritten
        return True

    def _preempt(self, seq: Sequence) -> None:
        host = self.host.allocate_many(len(seq.blocks))  # leak: abort() of a swapped sequence never releases host_blocks
        if host is None:
            self._release_seq(seq)
            seq.status = Status.WAITING
            self.waiting.appendleft(seq)
            return
        seq.host_blocks = host
        self._release_seq(seq)
        seq.status = Status.SWAPPED
        self.swapped.append(seq)

    def swap_in(self) -> None:
        for seq in list(self.swapped):
            blocks = self.device.allocate_many(len(seq.host_blocks))  # clean: stored in the sequence that goes back to running
            if blocks is None:
                break
            seq.blocks = blocks
            self.host.release_many(seq.host_blocks)
            seq.host_blocks = []
            self.swapped.remove(seq)
            seq.status = Status.RUNNING
            self.running.append(seq)

    def step(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        for seq in list(self.running):
            if seq.status is not Status.RUNNING:
                continue
            while not self._ensure_slot(seq):
                victim = self.running.pop()
                if victim in scheduled:
                    scheduled.remove(victim)
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                scheduled.append(seq)
        return scheduled

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release_seq(seq)
        seq.status = Status.FINISHED
        self.done.append(seq)

    def abort(self, seq_id: str) -> bool:
        for queue in (self.waiting, self.running, self.swapped):
            for seq in list(queue):
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self._release_seq(seq)
                    return True
        return False

    def close(self) -> None:
        for seq in self.running:
            self._release_seq(seq)
        self.running.clear()
        for seq in self.swapped:
            self.host.release_many(seq.host_blocks)
        self.swapped.clear()
        if self._sink is not None:
            self.device.release(self._sink)
            self._sink = None
