"""KV block scheduling for continuous batching."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Deque, Dict, List, Optional, Tuple


class NoBlocks(Exception):
    pass


class BlockPool:
    def __init__(self, count: int):
        self._free: Deque[int] = deque(range(count))

    def alloc(self) -> int:
        if not self._free:
            raise NoBlocks
        return self._free.popleft()

    def alloc_n(self, n: int) -> List[int]:
        if len(self._free) < n:
            raise NoBlocks
        return [self._free.popleft() for _ in range(n)]

    def free(self, block: int) -> None:
        self._free.append(block)

    def free_n(self, blocks: List[int]) -> None:
        self._free.extend(blocks)


class Phase(Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


@dataclass
class Request:
    rid: str
    prompt: List[int]
    phase: Phase = Phase.WAITING
    blocks: List[int] = field(default_factory=list)
    draft: List[int] = field(default_factory=list)
    host: List[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, gpu: BlockPool, host: BlockPool, block_size: int):
        self.gpu = gpu
        self.host = host
        self.block_size = block_size
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.swapped: List[Request] = []

    def admit(self) -> None:
        while self.waiting:
            req = self.waiting[0]
            try:
                req.blocks = self.gpu.alloc_n(-(-len(req.prompt) // self.block_size))  # clean: retire, swap_out and abort free the list
            except NoBlocks:
                return
            self.waiting.popleft()
            req.phase = Phase.RUNNING
            self.running.append(req)

    def grow(self, req: Request) -> bool:
        try:
            req.blocks.append(self.gpu.alloc())  # clean: appended to the list that retire frees
        except NoBlocks:
            return False
        return True

    def swap_out(self, req: Request) -> bool:
        try:
            req.host = self.host.alloc_n(len(req.blocks))  # leak: abort of a swapped request frees no host blocks
        except NoBlocks:
            return False
        self.gpu.free_n(req.blocks)
        req.blocks = []
        self.running.remove(req)
        self.swapped.append(req)
        req.phase = Phase.SWAPPED
        return True

    def swap_in(self) -> None:
        while self.swapped:
            req = self.swapped[0]
            try:
                req.blocks = self.gpu.alloc_n(len(req.host))  # clean: near miss, blocks is empty while swapped
            except NoBlocks:
                break
            self.host.free_n(req.host)
            req.host = []
            self.swapped.pop(0)
            req.phase = Phase.RUNNING
            self.running.append(req)

    def retire(self) -> List[Request]:
        done = [r for r in self.running if r.phase is Phase.FINISHED]
        self.running = [r for r in self.running if r.phase is not Phase.FINISHED]
        for req in done:
            self.gpu.free_n(req.blocks)
            req.blocks = []
        return done

    def abort(self, rid: str) -> bool:
        for queue in (self.waiting, self.running, self.swapped):
            for req in list(queue):
                if req.rid == rid:
                    queue.remove(req)
                    self.gpu.free_n(req.blocks)
                    req.blocks = []
                    return True
        return False


class SpeculativeStep:
    """Draft blocks are taken for the proposal and kept as far as accepted."""

    def __init__(self, pool: BlockPool, block_size: int):
        self.pool = pool
        self.block_size = block_size

    def propose(self, req: Request, k: int) -> bool:
        need = -(-k // self.block_size)
        try:
            req.draft = self.pool.alloc_n(need)  # leak: verify keeps the accepted ones and drops the rest of the list
        except NoBlocks:
            return False
        return True

    def verify(self, req: Request, accepted: int) -> None:
        used = -(-accepted // self.block_size)
        req.blocks.extend(req.draft[:used])
        req.draft = []


class BeamTable:
    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.beams: Dict[Tuple[str, int], List[int]] = {}

    def fork(self, rid: str, width: int) -> int:
        made = 0
        for i in range(width):
            if (rid, i) in self.beams:
                continue
            try:
                self.beams[rid, i] = [self.pool.alloc()]  # clean: near miss, skipped when present, end walks all keys of the request
            except NoBlocks:
                break
            made += 1
        return made

    def select(self, rid: str, order: List[int]) -> None:
        kept = {(rid, new): self.beams.pop((rid, old)) for new, old in enumerate(order)}
        for key in [k for k in self.beams if k[0] == rid]:
            self.pool.free_n(self.beams.pop(key))
        self.beams.update(kept)

    def end(self, rid: str) -> None:
        for key in [k for k in self.beams if k[0] == rid]:
            self.pool.free_n(self.beams.pop(key))


class ChunkedPrefill:
    """Takes blocks chunk by chunk; a request which does not fit starts over."""

    def __init__(self, pool: BlockPool, chunk: int):
        self.pool = pool
        self.chunk = chunk
        self.partial: Dict[str, List[int]] = {}

    def step(self, req: Request) -> bool:
        have = self.partial.setdefault(req.rid, [])
        try:
            have.extend(self.pool.alloc_n(self.chunk))  # leak: running out pops the partial list unfreed
        except NoBlocks:
            self.partial.pop(req.rid, None)
            return False
        if len(have) * self.chunk >= len(req.prompt):
            req.blocks = self.partial.pop(req.rid)
            req.phase = Phase.RUNNING
        return True


class SlidingWindow:
    """Holds the blocks of the attention window of each request."""

    def __init__(self, pool: BlockPool, window: int):
        self.pool = pool
        self.window = window
        self.tables: Dict[str, Deque[int]] = {}
        self.short: Dict[str, Deque[int]] = {}

    def slide(self, rid: str) -> None:
        table = self.tables.setdefault(rid, deque())
        table.append(self.pool.alloc())  # clean: near miss, what slides out is freed
        if len(table) > self.window:
            self.pool.free(table.popleft())

    def slide_short(self, rid: str, window: int) -> None:
        table = self.short.setdefault(rid, deque(maxlen=window))
        table.append(self.pool.alloc())  # leak: the bounded deque drops the oldest silently

    def end(self, rid: str) -> None:
        for tables in (self.tables, self.short):
            for block in tables.pop(rid, ()):
                self.pool.free(block)


class Preemptor:
    """Recompute preemption: blocks go back, the request waits again."""

    def __init__(self, pool: BlockPool):
        self.pool = pool

    def make_room(self, running: List[Request], req: Request, n: int) -> bool:
        while True:
            try:
                got = self.pool.alloc_n(n)  # clean: extends the request's blocks, ended by finish
                break
            except NoBlocks:
                if not running or running[-1] is req:
                    return False
                victim = running.pop()
                self.pool.free_n(victim.blocks)
                victim.blocks = []
                victim.phase = Phase.WAITING
        req.blocks.extend(got)
        req.phase = Phase.RUNNING
        return True

    def restart(self, req: Request, n: int) -> None:
        if req.phase is not Phase.WAITING:
            return
        req.blocks = self.pool.alloc_n(n)  # clean: near miss, waiting requests hold no blocks
        req.phase = Phase.RUNNING

    def finish(self, req: Request) -> None:
        self.pool.free_n(req.blocks)
        req.blocks = []
        req.phase = Phase.FINISHED
