from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

from .allocator import BlockAllocator, KVBlock
from .table import BlockTable, SwapMap


@dataclass
class Request:
    rid: str
    prompt: List[int]
    max_new: int = 16
    table: Optional[BlockTable] = None
    draft_block: Optional[KVBlock] = None
    best_of: int = 1
    children: List[BlockTable] = field(default_factory=list)
    output: List[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def done(self) -> bool:
        return self.aborted or len(self.output) >= self.max_new


class Scheduler:
    def __init__(self, device: BlockAllocator, host: BlockAllocator, block_size: int = 4) -> None:
        self.device = device
        self.block_size = block_size
        self.swap = SwapMap(host)
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.swapped: Deque[Request] = deque()
        self._sinks: Dict[str, KVBlock] = {}

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _admit(self, req: Request) -> bool:
        table = BlockTable(self.device, self.block_size)
        if not table.reserve(len(req.prompt)):
            return False
        block = self.device.allocate()  # leak: finish releases the table but not draft_block
        if block is None:
            table.release()
            return False
        req.draft_block = block
        req.table = table
        return True

    def schedule(self) -> List[Request]:
        while self.waiting and self._admit(self.waiting[0]):
            req = self.waiting.popleft()
            for _ in range(req.best_of - 1):
                req.children.append(req.table.fork())  # clean: finish releases every child
            self.running.append(req)
        while self.swapped:
            req = self.swapped[0]
            if not self.swap.swap_in(req.rid, req.table):
                break
            self.running.append(self.swapped.popleft())
        return list(self.running)

    def preempt(self) -> bool:
        if not self.running:
            return False
        req = self.running.pop()
        if self.swap.swap_out(req.rid, req.table):
            self.swapped.append(req)
            return True
        req.table.release()
        self.waiting.appendleft(req)
        return True

    def set_sink(self, rid: str) -> bool:
        """Attention-sink block that survives window eviction."""
        if rid in self._sinks:
            return True
        sink = self.device.allocate()  # clean: near miss, the only entry for rid; drop_sink frees it
        if sink is not None:
            self._sinks[rid] = sink
        return sink is not None

    def drop_sink(self, rid: str) -> None:
        sink = self._sinks.pop(rid, None)
        if sink is not None:
            self.device.free(sink)

    def can_run(self, req: Request) -> bool:
        """Dry run of admission for the router."""
        trial = self.device.allocate_many(-(-len(req.prompt) // self.block_size))  # clean: given straight back
        if trial is None:
            return False
        self.device.free_many(trial)
        return True

    def headroom(self, tokens: int) -> bool:
        probe = self.device.allocate_many(-(-tokens // self.block_size))  # leak: the answer is returned, the blocks are not
        return probe is not None

    def finish(self, req: Request) -> None:
        self.running.remove(req)
        for child in req.children:
            child.release()
        req.children = []
        req.table.release()
        self.drop_sink(req.rid)
        self.swap.forget(req.rid)
