from __future__ import annotations

import logging
from collections import deque
from typing import Callable, Deque, List, Optional

from .handoff import Job, grow, scratch_pages, settle
from .pages import PagePool, RoomTable

log = logging.getLogger(__name__)


class PrefillWorker:
    def __init__(self, pool: PagePool, rooms: RoomTable, run: Callable[[List[int], List[int]], bool], max_prompt: int):
        self.pool = pool
        self.rooms = rooms
        self.run = run
        self.max_prompt = max_prompt
        self.queue: Deque[Job] = deque()
        self.outbox: Deque[Job] = deque()

    def submit(self, job: Job) -> bool:
        room = self.rooms.book()  # leak: the room stays booked when the pages cannot be had
        if room < 0:
            return False
        if not grow(self.pool, job, len(job.prompt)):  # clean: the pages are on the job
            log.info("%s: no pages for %d tokens", job.rid, len(job.prompt))
            return False
        job.room = room
        self.queue.append(job)
        return True

    def submit_on_job(self, job: Job) -> bool:
        job.room = self.rooms.book()  # clean: on the job, settle() checks it out
        if job.room < 0 or not grow(self.pool, job, len(job.prompt)):  # clean: on the job, settle() frees it
            settle(self.pool, self.rooms, job)
            return False
        self.queue.append(job)
        return True

    def step(self) -> int:
        done = 0
        while self.queue:
            job = self.queue.popleft()
            if not self.run(job.prompt, job.pages):
                job.failed = "prefill"
                settle(self.pool, self.rooms, job)
                continue
            self.outbox.append(job)
            done += 1
        return done

    def score_prompts(self, prompts: List[List[int]]) -> List[bool]:
        results: List[bool] = []
        for p in prompts:
            pages = scratch_pages(self.pool, len(p), 64)  # leak: long prompts go to the next turn with their pages
            if pages is None:
                results.append(False)
                continue
            if len(p) > self.max_prompt:
                results.append(False)
                continue
            results.append(self.run(p, pages))
            self.pool.free_pages(pages)
        return results

    def next_out(self) -> Optional[Job]:
        return self.outbox.popleft() if self.outbox else None
