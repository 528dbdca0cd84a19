"""Block tables for a paged KV cache and the continuous-batching scheduler on top of them.

The allocator hands out reference counted blocks.  A sequence owns one reference for every
entry of its block table; beams share the prompt blocks with their parent until they write.
"""
from __future__ import annotations

import enum
import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Tuple

log = logging.getLogger(__name__)


class NoFreeBlocks(RuntimeError):
    pass


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3
    ABORTED = 4


@dataclass(eq=False)
class Block:
    idx: int
    ref: int = 0


@dataclass(eq=False)
class Sequence:
    sid: int
    tokens: List[int]
    status: Status = Status.WAITING
    parent: Optional["Sequence"] = None
    scores: List[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def clone(self, sid: int) -> "Sequence":
        return Sequence(sid, list(self.tokens), self.status, self, list(self.scores))


class BlockAllocator:
    def __init__(self, where: str, num_blocks: int) -> None:
        self.where = where
        self._free: Deque[Block] = deque(Block(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        if not self._free:
            raise NoFreeBlocks(f"no free {self.where} block")
        block = self._free.popleft()  # clean: handed to the caller
        block.ref = 1
        return block

    def allocate_many(self, n: int) -> Optional[List[Block]]:
        """All n blocks, or None."""
        out: List[Block] = []
        while len(out) < n:
            if not self._free:
                log.debug("%s pool short by %d blocks", self.where, n - len(out))
                return None
            block = self._free.popleft()  # leak: what is already in out is lost when the list runs dry half way
            block.ref = 1
            out.append(block)
        return out

    def share(self, block: Block) -> Block:
        block.ref += 1
        return block

    def release(self, block: Block) -> None:
        if block.ref <= 0:
            raise ValueError(f"double release of {self.where} block {block.idx}")
        block.ref -= 1
        if block.ref == 0:
            self._free.append(block)


class BlockSpace:
    def __init__(self, device_blocks: int, host_blocks: int, block_size: int, max_len: int) -> None:
        self.device = BlockAllocator("device", device_blocks)
        self.host = BlockAllocator("host", host_blocks)
        self.block_size = block_size
        self.max_len = max_len
        self.watermark = max(1, device_blocks // 100)
        self.tables: Dict[int, List[Block]] = {}
        self.images: Dict[int, List[Block]] = {}
        self.copies: List[Tuple[int, int]] = []

    def admit(self, seq: Sequence) -> bool:
        need = -(-seq.num_tokens // self.block_size)
        table = self.device.allocate_many(need)  # clean: owned by the table, drop() releases it
        if table is None:
            return False
        self.tables[seq.sid] = table
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make room for the token that is computed next."""
        table = self.tables[seq.sid]
        if seq.num_tokens > len(table) * self.block_size:
            try:
                table.append(self.device.allocate())  # clean: appended to the table of the sequence
            except NoFreeBlocks:
                return False
            return True
        last = table[-1]
        if last.ref == 1:
            return True
        if self.device.num_free == 0:
            return False
        fresh = self.device.allocate()  # clean: near miss, it takes the entry of last and last is released
        self.copies.append((last.idx, fresh.idx))
        table[-1] = fresh
        self.device.release(last)
        return True

    def fork(self, parent: Sequence) -> List[Block]:
        return [self.device.share(b) for b in self.tables[parent.sid]]  # clean: the references go to the caller

    def swap_out(self, seq: Sequence) -> None:
        image: List[Block] = []
        for block in self.tables[seq.sid]:
            slot = self.host.allocate()  # leak: raises when the host is full, the caller recomputes and image is forgotten
            self.copies.append((block.idx, slot.idx))
            image.append(slot)
        for block in self.tables.pop(seq.sid):
            self.device.release(block)
        self.images[seq.sid] = image

    def swap_in(self, seq: Sequence) -> bool:
        image = self.images[seq.sid]
        if self.device.num_free < len(image) + self.watermark:
            return False
        table = [self.device.allocate() for _ in image]  # leak: the early return for a sequence at its limit loses table
        if seq.num_tokens >= self.max_len:
            seq.status = Status.FINISHED
            self.drop(seq)
            return False
        for src, dst in zip(image, table):
            self.copies.append((src.idx, dst.idx))
            self.host.release(src)
        del self.images[seq.sid]
        self.tables[seq.sid] = table
        return True

    def drop(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.sid, ()):
            self.device.release(block)
        for block in self.images.pop(seq.sid, ()):
            self.host.release(block)

    def measure(self) -> int:
        """How many blocks can really be had right now."""
        grabbed: List[Block] = []
        try:
            while True:
                grabbed.append(self.device.allocate())  # clean: near miss, the loop ends by the exception and finally releases
        except NoFreeBlocks:
            return len(grabbed)
        finally:
            for block in grabbed:
                self.device.release(block)


class ScoreJob:
    """Keeps the prompt of a sequence alive while its log-probabilities are computed."""

    def __init__(self, space: BlockSpace, seq: Sequence) -> None:
        self._space = space
        self.blocks = space.fork(seq)  # clean: near miss, held by the job and released in __exit__
        self.result: Optional[List[float]] = None

    def __enter__(self) -> "ScoreJob":
        return self

    def __exit__(self, *exc) -> None:
        while self.blocks:
            self._space.device.release(self.blocks.pop())


class Scheduler:
    def __init__(self, space: BlockSpace, max_running: int) -> None:
        self.space = space
        self.max_running = max_running
        self.waiting: Deque[Sequence] = deque()
        self.running: List[Sequence] = []
        self.swapped: Deque[Sequence] = deque()
        self.pins: Dict[str, List[Block]] = {}
        self._ids = itertools.count(1_000_000)

    def step(self) -> List[Sequence]:
        while self.swapped and len(self.running) < self.max_running:
            seq = self.swapped[0]
            if not self.space.swap_in(seq):
                if seq.status is Status.FINISHED:
                    self.swapped.popleft()
                    continue
                break
            self.swapped.popleft()
            self.running.append(seq)
        while self.waiting and not self.swapped and len(self.running) < self.max_running:
            if not self.space.admit(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            while seq in self.running and not self.space.grow(seq):
                self._preempt(self.running[-1])
        return self.running

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        try:
            self.space.swap_out(victim)
        except NoFreeBlocks:
            self.space.drop(victim)
            victim.status = Status.WAITING
            self.waiting.appendleft(victim)
        else:
            victim.status = Status.SWAPPED
            self.swapped.append(victim)

    def expand(self, parent: Sequence, width: int) -> List[Sequence]:
        beams = [parent]
        for _ in range(width - 1):
            table = self.space.fork(parent)  # leak: the break below leaves before the table is bound to a child
            if len(self.running) >= self.max_running:
                log.info("beam width of %d cut to %d", width, len(beams))
                break
            child = parent.clone(next(self._ids))
            self.space.tables[child.sid] = table
            self.running.append(child)
            beams.append(child)
        return beams

    def pin_prefix(self, name: str, seq: Sequence, num_blocks: int) -> None:
        head = self.space.tables[seq.sid][:num_blocks]
        self.pins[name] = [self.space.device.share(b) for b in head]  # leak: a second pin of the name overwrites the first

    def unpin(self, name: str) -> None:
        for block in self.pins.pop(name, ()):
            self.space.device.release(block)

    def score(self, seq: Sequence, model) -> List[float]:
        with ScoreJob(self.space, seq) as job:  # clean: __exit__ releases also when it returns from inside
            job.result = model.logprobs([b.idx for b in job.blocks], seq.tokens)
            return job.result

    def finish(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self.running.remove(seq)
        self.space.drop(seq)

    def abort(self, seq: Sequence) -> None:
        for where in (self.running, self.waiting, self.swapped):
            if seq in where:
                where.remove(seq)
        seq.status = Status.ABORTED
        self.space.drop(seq)
