from __future__ import annotations

from collections import deque
from typing import Optional

from .pools import BlockPool
from .request import Request, State


class Scheduler:
    def __init__(self, blocks: BlockPool, max_running: int = 64):
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.max_running = max_running

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def admit(self) -> list[Request]:
        started = []
        while self.waiting and len(self.running) < self.max_running:
            req = self.waiting[0]
            got = self.blocks.lend(req.blocks_needed(self.blocks.block))  # clean: near miss, attached to the request, repaid by finish
            if got is None:
                break
            self.waiting.popleft()
            req.attach(got)
            req.state = State.RUNNING
            self.running[req.rid] = req
            started.append(req)
        return started

    def admit_urgent(self, req: Request) -> bool:
        got = self.blocks.lend(req.blocks_needed(self.blocks.block))  # leak: blocks are dropped when the running table is full
        if got is None:
            return False
        if len(self.running) >= self.max_running:
            self.waiting.appendleft(req)
            return False
        req.attach(got)
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True

    def grow(self, req: Request) -> bool:
        if req.blocks_needed(self.blocks.block) == 0:
            return True
        b = self.blocks.lend_one()  # clean: attached to the request
        if b is None:
            victim = self.pick_victim(req)
            if victim is None:
                return False
            self.preempt(victim)
            b = self.blocks.lend_one()  # clean: attached to the request
        if b is None:
            return False
        req.attach([b])
        return True

    def grow_by(self, req: Request, n: int) -> bool:
        got: list[int] = []
        for _ in range(n):
            b = self.blocks.lend_one()  # leak: blocks collected before the pool ran dry are not repaid
            if b is None:
                return False
            got.append(b)
        req.attach(got)
        return True

    def pick_victim(self, keep: Request) -> Optional[Request]:
        others = [r for r in self.running.values() if r is not keep]
        return max(others, key=lambda r: len(r.blocks), default=None)

    def preempt(self, req: Request) -> None:
        del self.running[req.rid]
        self.blocks.repay(req.detach())
        req.state = State.WAITING
        self.waiting.appendleft(req)

    def finish(self, req: Request, state: State = State.DONE) -> None:
        self.running.pop(req.rid, None)
        self.blocks.repay(req.detach())
        req.state = state

    def trim(self, req: Request, keep: int) -> None:
        """Sliding window: only the last `keep` blocks are needed."""
        old = req.detach()
        cut = max(0, len(old) - keep)
        self.blocks.repay(old[:cut])
        req.attach(old[cut:])

    def resume(self, req: Request, restore) -> bool:
        """`restore` copies the offloaded cache of the request back."""
        got = self.blocks.lend(req.blocks_needed(self.blocks.block))  # leak: not repaid when the offloaded cache is gone
        if got is None:
            return False
        if not restore(req, got):
            req.state = State.FAILED
            return False
        req.attach(got)
        req.state = State.RUNNING
        self.running[req.rid] = req
        return True
