from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

from .handoff import Job, grow, settle
from .pages import PagePool, RoomTable

log = logging.getLogger(__name__)


class DecodeWorker:
    def __init__(self, pool: PagePool, rooms: RoomTable, copy: Callable[[List[int], List[int]], bool]):
        self.pool = pool
        self.rooms = rooms
        self.copy = copy
        self.active: Dict[str, Job] = {}
        self.prealloc: Dict[str, List[int]] = {}

    def preallocate(self, rid: str, tokens: int) -> bool:
        """Pages wait here until the prefill side has finished."""
        if rid in self.prealloc:
            return True
        pages = self.pool.alloc_pages(self.pool.pages_for(tokens))  # clean: near miss, receive() and cancel() pop them
        if pages is None:
            return False
        self.prealloc[rid] = pages
        return True

    def receive(self, src: PagePool, job: Job) -> bool:
        pages = self.prealloc.get(job.rid)
        if pages is None:
            pages = self.pool.alloc_pages(len(job.pages))  # leak: not freed when the copy does not succeed
            if pages is None:
                return False
        if not self.copy(job.pages, pages):
            job.failed = "transfer"
            return False
        self.prealloc.pop(job.rid, None)
        src.free_pages(job.pages)
        job.pages = pages
        self.active[job.rid] = job
        return True

    def receive_direct(self, src: PagePool, job: Job) -> bool:
        pages = self.pool.alloc_pages(len(job.pages))  # clean: freed when the copy does not succeed
        if pages is None:
            return False
        ok = self.copy(job.pages, pages)
        if ok:
            src.free_pages(job.pages)
            job.pages = pages
            self.active[job.rid] = job
        else:
            self.pool.free_pages(pages)
        return ok

    def step(self, produced: Dict[str, int]) -> List[str]:
        stalled: List[str] = []
        for rid, n in produced.items():
            job = self.active.get(rid)
            if job is None:
                continue
            if not grow(self.pool, job, len(job.prompt) + n):  # clean: on the job, finish() settles it
                stalled.append(rid)
        return stalled

    def split(self, rid: str, child: str) -> bool:
        """Beam split: the child gets pages of its own."""
        if child in self.active:
            return False
        parent = self.active[rid]
        pages = self.pool.alloc_pages(len(parent.pages))  # clean: on the child's job
        if pages is None:
            return False
        job = Job(child, list(parent.prompt), parent.max_new, pages=pages)
        self.active[child] = job
        job.room = self.rooms.book()  # clean: near miss, on a job that is active, finish() settles both
        return self.copy(parent.pages, pages)

    def compact(self, rid: str) -> int:
        """Move a job to fresh pages, lowest numbers first."""
        job = self.active.get(rid)
        if job is None:
            return 0
        fresh = self.pool.alloc_pages(len(job.pages))  # leak: an order that is good already returns with the fresh pages
        if fresh is None:
            return 0
        if sorted(job.pages) == job.pages:
            return 0
        self.copy(job.pages, fresh)
        self.pool.free_pages(job.pages)
        job.pages = fresh
        return len(fresh)

    def finish(self, rid: str) -> None:
        job = self.active.pop(rid, None)
        if job is not None:
            settle(self.pool, self.rooms, job)

    def cancel(self, rid: str) -> None:
        pages = self.prealloc.pop(rid, None)
        if pages is not None:
            self.pool.free_pages(pages)
        self.finish(rid)
