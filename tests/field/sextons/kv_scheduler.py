from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._ref = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def alloc(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        self._ref[block] = 1
        return block

    def alloc_n(self, n: int) -> list[int] | None:
        out: list[int] = []
        for _ in range(n):
            block = self.alloc()  # clean: near miss, the partial list is freed before None is returned
            if block is None:
                self.free_all(out)
                return None
            out.append(block)
        return out

    def share(self, block: int) -> int:
        self._ref[block] += 1
        return block

    def free(self, block: int) -> None:
        self._ref[block] -= 1
        if self._ref[block] == 0:
            self._free.append(block)

    def free_all(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free(block)

    def is_shared(self, block: int) -> bool:
        return self._ref[block] > 1


class Phase(Enum):
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass
class Req:
    rid: str
    prompt: list[int]
    max_new: int
    output: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    cpu_table: list[int] = field(default_factory=list)
    spec_block: int | None = None
    phase: Phase = Phase.WAITING

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Scheduler:
    def __init__(self, gpu: BlockManager, cpu: BlockManager, max_running: int, max_blocks: int, use_spec: bool) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.max_running = max_running
        self.max_blocks = max_blocks
        self.use_spec = use_spec
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.swapped: deque[Req] = deque()
        self.copies: list[tuple[int, int]] = []

    def submit(self, req: Req) -> None:
        self.waiting.append(req)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            table = self.gpu.alloc_n(self.gpu.blocks_for(req.length))  # clean: near miss, without a speculation block the table is freed again
            if table is None:
                return
            if self.use_spec:
                req.spec_block = self.gpu.alloc()  # clean: near miss, _swap_out and _release both free it
                if req.spec_block is None:
                    self.gpu.free_all(table)
                    return
            req.table = table
            req.phase = Phase.RUNNING
            self.running.append(self.waiting.popleft())

    def _append_slot(self, req: Req) -> bool:
        last = req.table[-1]
        if req.length % self.gpu.block_size:
            if not self.gpu.is_shared(last):
                return True
            fresh = self.gpu.alloc()  # clean: near miss, it replaces the shared block, whose reference is given up
            if fresh is None:
                return False
            self.copies.append((last, fresh))
            self.gpu.free(last)
            req.table[-1] = fresh
            return True
        block = self.gpu.alloc()  # leak: a table at its limit refuses the block it has just taken
        if block is None:
            return False
        if len(req.table) >= self.max_blocks:
            return False
        req.table.append(block)
        return True

    def _swap_out(self, req: Req) -> bool:
        cpu_table = self.cpu.alloc_n(len(req.table))  # clean: near miss, kept in cpu_table until swap-in or abort
        if cpu_table is None:
            return False
        self.copies.extend(zip(req.table, cpu_table))
        self.gpu.free_all(req.table)
        if req.spec_block is not None:
            self.gpu.free(req.spec_block)
            req.spec_block = None
        req.table, req.cpu_table = [], cpu_table
        req.phase = Phase.SWAPPED
        self.swapped.append(req)
        return True

    def _swap_in(self) -> None:
        while self.swapped and len(self.running) < self.max_running:
            req = self.swapped[0]
            table = self.gpu.alloc_n(len(req.cpu_table))  # leak: when no speculation block is left the new table is dropped
            if table is None:
                return
            if self.use_spec:
                spec = self.gpu.alloc()  # clean: near miss, moved into spec_block, freed by _release
                if spec is None:
                    return
                req.spec_block = spec
            self.cpu.free_all(req.cpu_table)
            req.cpu_table, req.table = [], table
            req.phase = Phase.RUNNING
            self.running.append(self.swapped.popleft())

    def _release(self, req: Req) -> None:
        self.gpu.free_all(req.table)
        self.cpu.free_all(req.cpu_table)
        req.table, req.cpu_table = [], []
        if req.spec_block is not None:
            self.gpu.free(req.spec_block)
            req.spec_block = None
        req.phase = Phase.FINISHED

    def _recompute(self, req: Req) -> None:
        self._release(req)
        req.phase = Phase.WAITING
        self.waiting.appendleft(req)

    def schedule(self) -> list[Req]:
        self.copies.clear()
        self._swap_in()
        if not self.swapped:
            self._admit()
        keep: list[Req] = []
        pending = deque(self.running)
        while pending:
            req = pending.popleft()
            while not self._append_slot(req):
                victim = pending.pop() if pending else req
                if not self._swap_out(victim):
                    self._recompute(victim)
                if victim is req:
                    break
            else:
                keep.append(req)
        self.running = keep
        return keep

    def process(self, tokens: dict[str, int], eos: int) -> list[Req]:
        done: list[Req] = []
        for req in list(self.running):
            token = tokens[req.rid]
            req.output.append(token)
            if token == eos or len(req.output) >= req.max_new:
                self.running.remove(req)
                self._release(req)
                done.append(req)
        return done

    def abort(self, rid: str) -> bool:
        for group in (self.waiting, self.running, self.swapped):
            for req in group:
                if req.rid == rid:
                    group.remove(req)
                    self._release(req)
                    return True
        return False

    def beam(self, parent: Req, rids: list[str]) -> list[Req]:
        children: list[Req] = []
        for rid in rids:
            shared = [self.gpu.share(b) for b in parent.table]  # leak: a beam over the limit breaks off with its references taken
            if len(self.running) >= self.max_running:
                break
            child = Req(rid, list(parent.prompt), parent.max_new, list(parent.output), table=shared)
            child.phase = Phase.RUNNING
            self.running.append(child)
            children.append(child)
        return children

    def score_only(self, prompt: list[int]) -> int:
        blocks = self.gpu.alloc_n(self.gpu.blocks_for(len(prompt)))  # leak: only the first block is freed
        if not blocks:
            return -1
        self.copies.append((blocks[0], blocks[0]))
        used = len(blocks) * self.gpu.block_size
        self.gpu.free(blocks[0])
        return used - len(prompt)
