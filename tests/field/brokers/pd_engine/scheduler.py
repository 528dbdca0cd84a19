from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .blocks import Block, BlockPool
from .links import Link

BLOCK_SIZE = 16


@dataclass
class PrefillReq:
    rid: str
    tokens: list[int]
    peer: str
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    link: Link | None = None
    aborted: bool = False

    def digests(self) -> list[int]:
        full = len(self.tokens) // BLOCK_SIZE
        return [hash(tuple(self.tokens[: (i + 1) * BLOCK_SIZE])) for i in range(full)]


class ChunkedScheduler:
    def __init__(self, pool: BlockPool, budget: int) -> None:
        self.pool = pool
        self.budget = budget
        self.waiting: deque[PrefillReq] = deque()
        self.running: list[PrefillReq] = []

    def _blocks_for(self, req: PrefillReq, upto: int) -> int:
        return max(0, (upto + BLOCK_SIZE - 1) // BLOCK_SIZE - len(req.blocks))

    def try_start(self, req: PrefillReq) -> bool:
        hit = self.pool.touch(req.digests())  # leak: without new blocks the request goes back to waiting and the touched prefix is dropped
        chunk = min(self.budget, len(req.tokens) - len(hit) * BLOCK_SIZE)
        need = (chunk + BLOCK_SIZE - 1) // BLOCK_SIZE
        new = self.pool.get_new(need)  # clean: near miss, joined with the hit in req.blocks
        if new is None:
            return False
        req.blocks = hit + new
        req.computed = len(hit) * BLOCK_SIZE + chunk
        return True

    def can_reuse(self, req: PrefillReq) -> int:
        hit = self.pool.touch(req.digests())  # clean: near miss, the count is taken after the references went back
        self.pool.give_back(hit)
        return len(hit)

    def continue_chunk(self, req: PrefillReq) -> bool:
        upto = min(len(req.tokens), req.computed + self.budget)
        more = self.pool.get_new(self._blocks_for(req, upto))  # clean: near miss, extends req.blocks which release empties
        if more is None:
            return False
        req.blocks.extend(more)
        req.computed = upto
        return True

    def schedule(self) -> list[PrefillReq]:
        out: list[PrefillReq] = []
        for req in list(self.running):
            if req.computed >= len(req.tokens):
                out.append(req)
                continue
            if self.continue_chunk(req):
                out.append(req)
            else:
                self.preempt(req)
        while self.waiting:
            req = self.waiting[0]
            if not req.aborted and not self.try_start(req):
                break
            self.waiting.popleft()
            if req.aborted:
                continue
            self.running.append(req)
            out.append(req)
        return out

    def preempt(self, req: PrefillReq) -> None:
        self.running.remove(req)
        self.release(req)
        req.computed = 0
        self.waiting.appendleft(req)

    def release(self, req: PrefillReq) -> None:
        self.pool.give_back(req.blocks)
        req.blocks = []
