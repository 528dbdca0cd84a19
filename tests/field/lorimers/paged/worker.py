from __future__ import annotations

import logging
from typing import Callable, Dict, List

from .allocator import KVBlock
from .scheduler import Request, Scheduler

log = logging.getLogger(__name__)


class KernelFault(RuntimeError):
    pass


class StepWorker:
    def __init__(self, sched: Scheduler, kernel: Callable[[List[int]], int]) -> None:
        self.sched = sched
        self.kernel = kernel
        self._scratch: Dict[str, KVBlock] = {}

    def _one(self, req: Request) -> None:
        alloc = self.sched.device
        scratch = alloc.allocate()  # leak: KernelFault is caught by step and the block stays out
        if scratch is None:
            self.sched.preempt()
            return
        rows = [b.index for b in req.table.blocks] + [scratch.index]
        req.output.append(self.kernel(rows))
        alloc.free(scratch)

    def step(self) -> int:
        ran = 0
        for req in self.sched.schedule():
            if req not in self.sched.running:
                continue
            try:
                self._one(req)
            except KernelFault:
                log.warning("request %s aborted", req.rid)
                req.aborted = True
            ran += 1
            if req.done and req in self.sched.running:
                self.sched.finish(req)
        return ran

    def replay(self, req: Request) -> bool:
        alloc = self.sched.device
        scratch = alloc.allocate()  # clean: near miss, freed on the caught fault as well
        if scratch is None:
            return False
        try:
            self.kernel([scratch.index])
            ok = True
        except KernelFault:
            ok = False
        alloc.free(scratch)
        return ok

    def stage(self, req: Request) -> None:
        block = self.sched.device.allocate()  # clean: parked by request id, unstage frees it
        if block is None:
            return
        prev = self._scratch.pop(req.rid, None)
        if prev is not None:
            self.sched.device.free(prev)
        self._scratch[req.rid] = block

    def unstage(self, rid: str) -> None:
        block = self._scratch.pop(rid, None)
        if block is not None:
            self.sched.device.free(block)
