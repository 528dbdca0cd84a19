"""Continuous batching: admission, growth, preemption, beams."""
from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import Deque, Dict, List, Optional, Set

from .pages import PageAllocator, PageRun
from .request import Request, Status

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, alloc: PageAllocator, max_loras: int = 2) -> None:
        self.alloc = alloc
        self.max_loras = max_loras
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}
        self.scratch: Dict[str, PageRun] = {}
        self._beam_ids = itertools.count()

    def add(self, req: Request) -> None:
        self.waiting.append(req)

    def _loras(self) -> Set[str]:
        return {r.lora for r in self.running.values() if r.lora}

    def schedule(self) -> List[str]:
        started: List[str] = []
        skipped: List[Request] = []
        while self.waiting:
            req = self.waiting.popleft()
            run = self.alloc.grab(req.prompt_pages)  # leak: a request held back for its adapter is skipped with the run
            if run is None:
                self.waiting.appendleft(req)
                break
            loras = self._loras()
            if req.lora and req.lora not in loras and len(loras) >= self.max_loras:
                skipped.append(req)
                continue
            req.runs.append(run)
            req.status = Status.RUNNING
            self.running[req.rid] = req
            started.append(req.rid)
        self.waiting.extendleft(reversed(skipped))
        return started

    def grow(self, rid: str) -> bool:
        """One more page for decode; preempts the youngest other request when dry."""
        req = self.running[rid]
        while (run := self.alloc.grab(1)) is None:  # clean: near miss, the loop turns only without a run, which then joins the request
            victim = next((r for r in reversed(list(self.running.values())) if r is not req), None)
            if victim is None:
                return False
            self.preempt(victim.rid)
        req.runs.append(run)
        return True

    def preempt(self, rid: str) -> None:
        req = self.running.pop(rid)
        req.release(self.alloc)
        req.status = Status.PREEMPTED
        self.waiting.appendleft(req)

    def reserve_lookahead(self, rid: str, k: int) -> bool:
        req = self.running[rid]
        if req.lookahead is not None:
            return True
        req.lookahead = self.alloc.grab(k)  # clean: near miss, the field is empty by the check above and released with the request
        return req.lookahead is not None

    def spread(self, rid: str, width: int) -> List[str]:
        """Beams over one prompt."""
        parent = self.running[rid]
        names: List[str] = []
        for _ in range(width):
            child = parent.fork(f"{rid}.{next(self._beam_ids)}", self.alloc)  # leak: a beam without a tail page is skipped with its references
            tail = self.alloc.grab(1)  # clean: None-checked, joins the child's runs
            if tail is None:
                logger.info("beam %s not started", child.rid)
                continue
            child.runs.append(tail)
            self.running[child.rid] = child
            names.append(child.rid)
        return names

    def spread_checked(self, rid: str, width: int) -> bool:
        children: List[Request] = []
        for _ in range(width):
            child = self.running[rid].fork(f"{rid}.{next(self._beam_ids)}", self.alloc)  # clean: near miss, in children before anything can fail
            children.append(child)
            tail = self.alloc.grab(1)  # clean: joins the child or is None
            if tail is None:
                while children:
                    children.pop().release(self.alloc)
                return False
            child.runs.append(tail)
        self.running.update((c.rid, c) for c in children)
        return True

    def finish(self, rid: str) -> None:
        req = self.running.pop(rid, None)
        if req is None:
            return
        req.status = Status.DONE
        req.release(self.alloc)

    def abort(self, rid: str) -> bool:
        for req in list(self.waiting):
            if req.rid == rid:
                self.waiting.remove(req)
                return True
        if rid in self.running:
            self.finish(rid)
            return True
        return False

    def open_scratch(self, rid: str, n: int) -> bool:
        """Workspace of the cascade kernel; its size changes as the shared prefix grows."""
        run = self.alloc.grab(n)  # leak: opening again for the grown prefix overwrites the entry with the earlier run in it
        if run is None:
            return False
        self.scratch[rid] = run
        return True

    def close_scratch(self, rid: str) -> None:
        run = self.scratch.pop(rid, None)
        if run is not None:
            self.alloc.unref(run)
