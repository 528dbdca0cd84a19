"""Block-granular KV scheduling for a single-node decode engine."""
from __future__ import annotations

import collections
import enum
from dataclasses import dataclass, field


class BlockPool:
    def __init__(self, num_blocks):
        self._free = collections.deque(range(num_blocks))
        self._used = set()

    @property
    def num_free(self):
        return len(self._free)

    def alloc(self):
        if not self._free:
            return None
        block = self._free.popleft()
        self._used.add(block)
        return block

    def free(self, block):
        self._used.remove(block)
        self._free.append(block)


class Phase(enum.Enum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2
    PAUSED = 3
    DONE = 4


@dataclass
class Request:
    rid: str
    prompt_len: int
    blocks: list = field(default_factory=list)
    phase: Phase = Phase.WAITING

    def blocks_needed(self, block_size):
        return -(-self.prompt_len // block_size)


class DecodeScheduler:
    def __init__(self, pool, block_size=16, max_running=64):
        self.pool = pool
        self.block_size = block_size
        self.max_running = max_running
        self.waiting = collections.deque()
        self.running = {}

    def admit(self):
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            req.blocks = []
            for _ in range(req.blocks_needed(self.block_size)):
                block = self.pool.alloc()  # leak: pool runs dry half way, the request keeps waiting and its list is reset on the next try
                if block is None:
                    return
                req.blocks.append(block)
            self.waiting.popleft()
            self.running[req.rid] = req

    def grow(self, rid):
        req = self.running[rid]
        block = self.pool.alloc()  # clean: appended to the running request, freed by retire
        if block is None:
            return False
        req.blocks.append(block)
        return True

    def retire(self, rid):
        req = self.running.pop(rid)
        for block in req.blocks:
            self.pool.free(block)
        req.blocks = []


class ChunkedPrefill:
    def __init__(self, pool, chunk_blocks):
        self.pool = pool
        self.chunk_blocks = chunk_blocks
        self.requests = {}

    def submit(self, req):
        self.requests[req.rid] = req

    def run_chunk(self, rid):
        req = self.requests[rid]
        if self.pool.num_free < self.chunk_blocks:
            req.phase = Phase.PAUSED
            return False
        for _ in range(self.chunk_blocks):
            req.blocks.append(self.pool.alloc())  # leak: a request paused after its first chunk is ended without freeing
        req.phase = Phase.PREFILL
        return True

    def end(self, rid):
        req = self.requests.pop(rid, None)
        if req is None:
            return
        if req.phase in (Phase.PREFILL, Phase.DECODE):
            for block in req.blocks:
                self.pool.free(block)
            req.blocks.clear()
        req.phase = Phase.DONE


class BeamGroup:
    def __init__(self, pool, width):
        self.pool = pool
        self.width = width
        self.beams = []

    def expand(self, scores):
        for score in scores:
            block = self.pool.alloc()  # clean: near miss, the beams beyond the width are freed before they are cut off
            if block is None:
                break
            self.beams.append((score, block))
        self.beams.sort(reverse=True)
        for _, block in self.beams[self.width:]:
            self.pool.free(block)
        del self.beams[self.width:]

    def close(self):
        for _, block in self.beams:
            self.pool.free(block)
        self.beams = []


class SlidingWindowTables:
    def __init__(self, pool, window_blocks):
        self.pool = pool
        self.window_blocks = window_blocks
        self.tables = {}

    def append(self, rid):
        block = self.pool.alloc()  # leak: blocks that leave the window are sliced off the table unfreed
        if block is None:
            return False
        table = self.tables.get(rid, [])
        table.append(block)
        self.tables[rid] = table[-self.window_blocks:]
        return True

    def finish(self, rid):
        for block in self.tables.pop(rid, ()):
            self.pool.free(block)


class PreemptingScheduler:
    def __init__(self, pool):
        self.pool = pool
        self.tables = {}
        self.order = []
        self.evicted = []

    def start(self, rid, count):
        if rid in self.tables:
            return True
        while self.pool.num_free < count:
            if not self.order:
                return False
            self._preempt_last()
        self.tables[rid] = [self.pool.alloc() for _ in range(count)]  # clean: near miss, key is guarded above, preempt and finish free the list
        self.order.append(rid)
        return True

    def _preempt_last(self):
        victim = self.order.pop()
        for block in self.tables.pop(victim):
            self.pool.free(block)
        self.evicted.append(victim)

    def finish(self, rid):
        if rid in self.tables:
            self.order.remove(rid)
            for block in self.tables.pop(rid):
                self.pool.free(block)


class CompactingTables:
    """Moves hot sequences towards low block numbers between steps."""

    def __init__(self, pool, copy_block):
        self.pool = pool
        self.copy_block = copy_block
        self.tables = collections.defaultdict(list)

    def append(self, rid):
        block = self.pool.alloc()  # leak: relocate overwrites the table entry and never frees the block it moved from
        if block is not None:
            self.tables[rid].append(block)
        return block is not None

    def relocate(self, rid, index):
        target = self.pool.alloc()  # leak: the same index relocated again overwrites it (by meaning)
        if target is None:
            return False
        self.copy_block(self.tables[rid][index], target)
        self.tables[rid][index] = target
        return True

    def finish(self, rid):
        for block in self.tables.pop(rid, []):
            self.pool.free(block)


class GraphPadding:
    """Padding block that a captured graph reads when the batch is short."""

    def __init__(self, pool):
        self.pool = pool
        self.pad = None

    def begin(self):
        if self.pad is None:
            self.pad = self.pool.alloc()  # clean: near miss, field is filled only when empty and end frees it
        return self.pad

    def end(self):
        if self.pad is not None:
            self.pool.free(self.pad)
            self.pad = None
