from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional

from .pages import PageError, PageManager
from .request import Request, Status
from .slots import RowPool


class Scheduler:
    def __init__(self, pages: PageManager, rows: RowPool, max_len: int) -> None:
        self.pages = pages
        self.rows = rows
        self.max_len = max_len
        self.waiting: Deque[Request] = deque()
        self.running: List[Request] = []
        self.parked: Dict[str, Request] = {}

    def schedule(self, budget: int) -> List[Request]:
        out: List[Request] = []
        while self.waiting and budget > 0:
            req = self.waiting[0]
            pages = self.pages.grab_for(req.prompt_len)  # leak: no free row breaks out with the pages in a local
            if pages is None:
                break
            row = self.rows.take(req.rid)  # clean: moved to the request
            if row is None:
                break
            self.waiting.popleft()
            req.pages, req.row = pages, row
            req.status = Status.RUNNING
            budget -= req.prompt_len
            out.append(req)
        self.running.extend(out)
        return out

    def schedule_priority(self, budget: int) -> List[Request]:
        out: List[Request] = []
        for req in sorted(self.waiting, key=lambda r: -r.priority):
            row = self.rows.take(req.rid)  # clean: near miss, dropped where there are no pages
            if row is None:
                break
            pages = self.pages.grab_for(req.prompt_len)  # leak: past the budget only the row is dropped
            if pages is None:
                self.rows.drop(row)
                continue
            if req.prompt_len > budget:
                self.rows.drop(row)
                continue
            req.pages, req.row, req.status = pages, row, Status.RUNNING
            budget -= req.prompt_len
            out.append(req)
        for req in out:
            self.waiting.remove(req)
        self.running.extend(out)
        return out

    def grow_running(self) -> List[Request]:
        """Extends pages by one token each, preempting from the tail."""
        preempted: List[Request] = []
        i = 0
        while i < len(self.running):
            req = self.running[i]
            while not self.pages.grow(req.pages, req.length + 1):  # clean: near miss, the pages stay in the request
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is req:
                    break
            i += 1
        self.waiting.extendleft(preempted)
        return preempted

    def _preempt(self, req: Request) -> None:
        self.pages.release(req.pages)
        if req.row is not None:
            self.rows.drop(req.row)
        req.pages, req.row, req.computed = [], None, 0
        req.status = Status.PREEMPTED

    def finish(self) -> List[Request]:
        finished = [r for r in self.running if r.done]
        for req in finished:
            self._preempt(req)
            req.status = Status.FINISHED
        self.running = [r for r in self.running if not r.done]
        return finished

    def park(self, req: Request) -> None:
        """A finished turn keeps its pages for the next turn of the dialogue."""
        self.running.remove(req)
        if req.row is not None:
            self.rows.drop(req.row)
            req.row = None
        self.parked[req.rid] = req

    def resume(self, rid: str) -> bool:
        req = self.parked.pop(rid, None)
        if req is None:
            return False
        row = self.rows.take(rid)  # clean: None re-parks, else moved to the request
        if row is None:
            self.parked[rid] = req
            return False
        req.row, req.status = row, Status.RUNNING
        self.running.append(req)
        return True

    def forget(self, rid: str) -> None:
        req = self.parked.pop(rid, None)
        if req is not None:
            self.pages.release(req.pages)
            req.pages = []

    def restart(self, req: Request, prompt_len: int) -> bool:
        """An edited prompt starts over on fresh pages."""
        fresh = self.pages.grab_for(prompt_len)  # clean: near miss, replaces the old pages after these are released
        if fresh is None:
            return False
        self.pages.release(req.pages)
        req.pages, req.prompt_len, req.generated = fresh, prompt_len, 0
        return True

    def warmup(self, lengths: List[int]) -> int:
        """Dummy prefill of each length; those that do not fit are skipped."""
        ran = 0
        for n in lengths:
            try:
                row = self.rows.take_or_raise(f"warmup-{n}")  # leak: PageError is caught and the row stays owned
                pages = self.pages.table.grab(self.pages.pages_needed(n))  # clean: released below, and nothing after it fails into the handler
                ran += len(pages) > 0
                self.pages.release(pages)
                self.rows.drop(row)
            except PageError:
                continue
        return ran

    def encoder_pass(self, req: Request) -> bool:
        row = self.rows.take_or_raise(req.rid + "/enc")  # leak: a prompt over the limit returns with the row
        if req.prompt_len > self.max_len:
            return False
        req.computed = req.prompt_len
        self.rows.drop(row)
        return True
