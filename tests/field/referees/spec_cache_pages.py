"""Page cache of a dynamic generator (paged attention with draft model) in the manner of small inference engines."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generator, Optional

import torch


@dataclass
class Page:
    index: int
    refs: int = 0
    phash: Optional[bytes] = None


class PageTable:
    def __init__(self, n: int) -> None:
        self.pages = [Page(i) for i in range(n)]
        self.unref: deque[Page] = deque(self.pages)
        self.hashed: dict[bytes, Page] = {}

    def new_page(self) -> Optional[Page]:
        if not self.unref:
            return None
        page = self.unref.popleft()
        if page.phash is not None:
            self.hashed.pop(page.phash, None)
            page.phash = None
        page.refs = 1
        return page

    def add_ref(self, page: Page) -> Page:
        if page.refs == 0:
            self.unref.remove(page)
        page.refs += 1
        return page

    def sub_ref(self, page: Page) -> None:
        page.refs -= 1
        if page.refs == 0:
            self.unref.append(page)

    def find(self, phash: bytes) -> Optional[Page]:
        page = self.hashed.get(phash)
        return None if page is None else self.add_ref(page)  # clean: near miss, the reference goes to the caller

    def drop_hashes(self, keep_below: int) -> int:
        dropped = 0
        for _ in range(len(self.unref)):
            page = self.unref.popleft()  # leak: pages whose hash is dropped are skipped by continue and leave the free list for good
            if page.phash is not None and page.index >= keep_below:
                self.hashed.pop(page.phash, None)
                page.phash = None
                dropped += 1
                continue
            self.unref.append(page)
        return dropped


@dataclass
class Job:
    prompt: list[bytes]
    budget: int
    pages: list[Page] = field(default_factory=list)
    draft_pages: list[Page] = field(default_factory=list)
    tail: Optional[Page] = None
    banned: bool = False
    out: list[int] = field(default_factory=list)


class DynamicGenerator:
    def __init__(self, table: PageTable, draft: Optional[PageTable] = None) -> None:
        self.table = table
        self.draft = draft
        self.active: list[Job] = []
        self.pending: deque[Job] = deque()

    def prepare(self, job: Job) -> bool:
        for phash in job.prompt:
            page = self.table.find(phash)  # clean: near miss, hit or new the page lands in job.pages
            if page is None:
                page = self.table.new_page()  # clean: near miss, running dry deallocates everything in job.pages
                if page is None:
                    self.deallocate(job)
                    return False
                page.phash = phash
                self.table.hashed[phash] = page
            job.pages.append(page)
        if self.draft is not None:
            for _ in job.prompt:
                dpage = self.draft.new_page()  # clean: near miss, draft_pages are given back by deallocate
                if dpage is None:
                    self.deallocate(job)
                    return False
                job.draft_pages.append(dpage)
        self.active.append(job)
        return True

    def deallocate(self, job: Job) -> None:
        for page in job.pages:
            self.table.sub_ref(page)
        job.pages.clear()
        if self.draft is not None:
            for page in job.draft_pages:
                self.draft.sub_ref(page)
            job.draft_pages.clear()

    def grow(self, job: Job) -> bool:
        job.tail = self.table.new_page()  # leak: at the next page boundary the tail is overwritten, it was never put into job.pages
        return job.tail is not None

    def step(self) -> list[Job]:
        finished: list[Job] = []
        for job in list(self.active):
            job.out.append(len(job.out))
            if len(job.out) % 256 == 0 and not self.grow(job):
                finished.append(job)
            elif len(job.out) >= job.budget:
                finished.append(job)
        for job in finished:
            self.active.remove(job)
            self.deallocate(job)
            if job.tail is not None:
                self.table.sub_ref(job.tail)
                job.tail = None
        return finished

    def cancel(self, job: Job) -> None:
        if job in self.active:
            self.active.remove(job)
            self.deallocate(job)
            if job.tail is not None:
                self.table.sub_ref(job.tail)
                job.tail = None
        elif job in self.pending:
            self.pending.remove(job)

    def checkpoint(self, job: Job) -> list[Page]:
        return [self.table.add_ref(p) for p in job.pages]  # clean: near miss, the list of references is what restore takes over

    def restore(self, job: Job, saved: list[Page]) -> None:
        self.deallocate(job)
        job.pages = saved

    def rewind(self, job: Job, tokens: int) -> bool:
        saved = self.checkpoint(job)  # leak: a rewind longer than the output returns with the references in a local
        if tokens > len(job.out):
            return False
        del job.out[len(job.out) - tokens :]
        self.restore(job, saved)
        return True

    def shared_pages(self, a: Job, b: Job) -> int:
        count = 0
        for phash in a.prompt:
            page = self.table.find(phash)  # leak: a page that b does not use breaks the loop with the reference held
            if page is None:
                break
            if page not in b.pages:
                break
            count += 1
            self.table.sub_ref(page)
        return count

    def stream(self, job: Job) -> Generator[int, None, None]:
        if not self.prepare(job):  # clean: near miss, cancel in finally covers an abandoned generator, step covers the end
            return
        try:
            sent = 0
            while job in self.active:
                self.step()
                yield from job.out[sent:]
                sent = len(job.out)
        finally:
            self.cancel(job)

    def run_draft(self, k: int) -> list[int]:
        assert self.draft is not None
        used: list[Page] = []
        accepted: list[int] = []
        for i in range(k):
            page = self.draft.new_page()  # clean: near miss, used is given back after the loop however it ends
            if page is None:
                break
            used.append(page)
            if bool(torch.rand(()) < 0.2):
                break
            accepted.append(i)
        for page in used:
            self.draft.sub_ref(page)
        return accepted

    def probe_capacity(self) -> int:
        got: list[Page] = []
        while (page := self.table.new_page()) is not None:  # clean: near miss, everything counted is given back
            got.append(page)
        for page in got:
            self.table.sub_ref(page)
        return len(got)
