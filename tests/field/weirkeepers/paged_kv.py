"""Paged KV blocks and the step scheduler that drives them."""
from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import logging
import time
from typing import Deque, Dict, List, Optional, Tuple

log = logging.getLogger(__name__)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


class BlockPool:
    """Reference counted blocks of one memory tier."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: Deque[int] = collections.deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def allocate(self) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> Optional[List[int]]:
        if count > len(self._free):
            return None
        out = []
        for _ in range(count):
            block = self._free.popleft()
            self._refs[block] = 1
            out.append(block)
        return out

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1

    def free(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def free_many(self, blocks: List[int]) -> None:
        for block in blocks:
            self.free(block)


@dataclasses.dataclass
class Sequence:
    seq_id: int
    prompt: List[int]
    max_tokens: int = 256
    encoder_len: int = 0
    output: List[int] = dataclasses.field(default_factory=list)
    blocks: List[int] = dataclasses.field(default_factory=list)
    cross_blocks: List[int] = dataclasses.field(default_factory=list)
    host_blocks: List[int] = dataclasses.field(default_factory=list)
    status: Status = Status.WAITING
    score: float = 0.0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class StepScheduler:
    def __init__(self, device: BlockPool, host: BlockPool, max_seqs: int) -> None:
        self.device = device
        self.host = host
        self.max_seqs = max_seqs
        self.waiting: Deque[Sequence] = collections.deque()
        self.running: List[Sequence] = []
        self.swapped: Deque[Sequence] = collections.deque()
        self.copies: List[Tuple[int, int]] = []
        self._ids = itertools.count(1 << 20)

    # admission ---------------------------------------------------------

    def admit(self) -> List[Sequence]:
        admitted: List[Sequence] = []
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            need = ceil_div(max(seq.length, 1), self.device.block_size)
            blocks = self.device.allocate_many(need)  # clean: moved to seq.blocks, freed by _retire
            if blocks is None:
                break
            seq.blocks = blocks
            if seq.encoder_len:
                width = ceil_div(seq.encoder_len, self.device.block_size)
                cross = self.device.allocate_many(width)  # leak: nothing ever frees seq.cross_blocks
                if cross is None:
                    self.device.free_many(seq.blocks)
                    seq.blocks = []
                    break
                seq.cross_blocks = cross
            self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    # growth ------------------------------------------------------------

    def append_slot(self, seq: Sequence) -> bool:
        if seq.length % self.device.block_size:
            return self._private_tail(seq)
        block = self.device.allocate()  # clean: appended to seq.blocks
        if block is None:
            return False
        seq.blocks.append(block)
        return True

    def _private_tail(self, seq: Sequence) -> bool:
        tail = seq.blocks[-1]
        if not self.device.shared(tail):
            return True
        fresh = self.device.allocate()  # clean: near miss, takes the tail's place, the tail is dropped
        if fresh is None:
            return False
        self.copies.append((tail, fresh))
        seq.blocks[-1] = fresh
        self.device.free(tail)
        return True

    def reserve_lookahead(self, seq: Sequence, depth: int) -> int:
        extra = self.device.allocate_many(ceil_div(depth, self.device.block_size))  # leak: room <= 1
        if extra is None:
            return 0
        room = seq.max_tokens - len(seq.output)
        if room <= 1:
            log.debug("seq %d has no room for drafts", seq.seq_id)
            return 0
        seq.blocks.extend(extra)
        return min(depth, room)

    # forks -------------------------------------------------------------

    def fork(self, parent: Sequence) -> Sequence:
        child = Sequence(next(self._ids), list(parent.prompt), parent.max_tokens)
        child.output = list(parent.output)
        for block in parent.blocks:
            child.blocks.append(self.device.incref(block))  # clean: owned by the child, which is returned
        return child

    def fan_out(self, seq: Sequence, n: int) -> int:
        made = 0
        for _ in range(n - 1):
            child = self.fork(seq)  # clean: near miss, retired when it cannot grow, else running
            if not self.append_slot(child):
                self._retire(child)
                break
            child.status = Status.RUNNING
            self.running.append(child)
            made += 1
        return made

    def expand_beams(self, parents: List[Sequence], top: Dict[int, list], width: int) -> None:
        beams: List[Sequence] = []
        floor = max(p.score for p in parents) - 12.0
        for parent in parents:
            for token, logprob in top[parent.seq_id][: 2 * width]:
                child = self.fork(parent)  # leak: continue below the floor drops the child's blocks
                child.output.append(token)
                child.score = parent.score + logprob
                if child.score < floor:
                    continue
                beams.append(child)
        beams.sort(key=lambda s: s.score, reverse=True)
        for loser in beams[width:]:
            self._retire(loser)
        for parent in parents:
            self.running.remove(parent)
            self._retire(parent)
        self.running.extend(beams[:width])

    # swapping ----------------------------------------------------------

    def swap_out(self, seq: Sequence) -> None:
        self.running.remove(seq)
        host = self.host.allocate_many(len(seq.blocks))  # clean: seq.host_blocks, freed by swap_in or _retire
        if host is None:
            self._retire(seq)
            seq.status = Status.WAITING
            self.waiting.appendleft(seq)
            return
        self.copies.extend(zip(seq.blocks, host))
        seq.host_blocks = host
        self.device.free_many(seq.blocks)
        seq.blocks = []
        seq.status = Status.SWAPPED
        self.swapped.append(seq)

    def swap_in(self) -> int:
        restored = 0
        while self.swapped:
            seq = self.swapped[0]
            blocks = self.device.allocate_many(len(seq.host_blocks))  # leak: break without a spare
            if blocks is None:
                break
            spare = self.device.allocate()  # clean: becomes the next tail of seq.blocks
            if spare is None:
                break
            self.swapped.popleft()
            self.copies.extend(zip(seq.host_blocks, blocks))
            self.host.free_many(seq.host_blocks)
            seq.host_blocks = []
            seq.blocks = blocks + [spare]
            seq.status = Status.RUNNING
            self.running.append(seq)
            restored += 1
        return restored

    def profile_shapes(self, sizes: List[int]) -> Dict[int, float]:
        timings: Dict[int, float] = {}
        blocks: List[int] = []
        for size in sizes:
            start = time.perf_counter()
            blocks = self.device.allocate_many(size) or []  # leak: only the last turn's are freed
            timings[size] = time.perf_counter() - start
        self.device.free_many(blocks)
        return timings

    # end of life ---------------------------------------------------------

    def _retire(self, seq: Sequence) -> None:
        self.device.free_many(seq.blocks)
        self.host.free_many(seq.host_blocks)
        seq.blocks, seq.host_blocks = [], []
        seq.status = Status.DONE

    def finish_step(self, stop_ids: set) -> List[Sequence]:
        done = [s for s in self.running if s.output and s.output[-1] in stop_ids]
        for seq in done:
            self.running.remove(seq)
            self._retire(seq)
        return done

    def abort(self, seq_id: int) -> bool:
        for queue in (self.running, self.swapped, self.waiting):
            for seq in list(queue):
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self._retire(seq)
                    return True
        return False
