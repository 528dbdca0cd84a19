from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Iterator, Optional


class CachePage:
    __slots__ = ("index", "refs", "fill")

    def __init__(self, index: int) -> None:
        self.index = index
        self.refs = 0
        self.fill = 0


class PageTable:
    def __init__(self, num_pages: int) -> None:
        self._unused: deque[CachePage] = deque(CachePage(i) for i in range(num_pages))

    def grab(self) -> Optional[CachePage]:
        if not self._unused:
            return None
        page = self._unused.popleft()
        page.refs = 1
        return page

    def add_ref(self, page: CachePage) -> CachePage:
        page.refs += 1
        return page

    def sub_ref(self, page: CachePage) -> None:
        page.refs -= 1
        if page.refs == 0:
            page.fill = 0
            self._unused.append(page)

    def grab_many(self, count: int) -> Optional[list[CachePage]]:
        pages: list[CachePage] = []
        for _ in range(count):
            page = self.grab()  # clean: near miss, a short run hands the pages back before None is returned
            if page is None:
                for held in pages:
                    self.sub_ref(held)
                return None
            pages.append(page)
        return pages

    def grab_up_to(self, count: int) -> list[CachePage]:
        pages: list[CachePage] = []
        while len(pages) < count:
            page = self.grab()  # clean: returned in the list, shorter when the table runs dry
            if page is None:
                break
            pages.append(page)
        return pages


class FilterQueue:
    def __init__(self, size: int) -> None:
        self._tickets = set(range(size))

    def draw(self) -> int:
        return self._tickets.pop() if self._tickets else -1

    def hand_in(self, ticket: int) -> None:
        self._tickets.add(ticket)


@dataclass
class Sequence:
    ids: list[int]
    pages: list[CachePage] = field(default_factory=list)


@dataclass
class Job:
    serial: int
    sequences: list[Sequence]
    max_new: int
    produced: int = 0
    checkpoint: Optional[list[CachePage]] = None
    ticket: int = -1


class DynamicGenerator:
    def __init__(self, table: PageTable, filters: FilterQueue, page_size: int) -> None:
        self.table = table
        self.filters = filters
        self.page_size = page_size
        self.active: list[Job] = []
        self.pending: deque[Job] = deque()

    def enqueue(self, job: Job) -> None:
        self.pending.append(job)

    def _start(self, job: Job) -> bool:
        for seq in job.sequences:
            count = -(-(len(seq.ids) + job.max_new) // self.page_size)
            pages = self.table.grab_many(count)  # leak: when a later sequence does not fit, pages of earlier ones stay and the retry overwrites them
            if pages is None:
                return False
            seq.pages = pages
        return True

    def iterate_start(self) -> int:
        started = 0
        while self.pending:
            job = self.pending[0]
            ticket = self.filters.draw()  # clean: near miss, handed in when the job cannot start and kept by the job if it can
            if ticket < 0:
                break
            if not self._start(job):
                self.filters.hand_in(ticket)
                break
            job.ticket = ticket
            self.active.append(self.pending.popleft())
            started += 1
        return started

    def checkpoint(self, job: Job) -> None:
        if job.checkpoint is not None:
            self._drop_pages(job.checkpoint)
        job.checkpoint = [self.table.add_ref(p) for s in job.sequences for p in s.pages]  # clean: near miss, the former checkpoint is dropped first

    def rewind(self, job: Job) -> bool:
        saved = job.checkpoint
        if saved is None:
            return False
        fresh = self.table.grab()  # leak: appended to a copy of the page list that nobody keeps
        if fresh is None:
            return False
        pages = list(job.sequences[0].pages)
        pages.append(fresh)
        job.produced = len(pages)
        return True

    def _drop_pages(self, pages: list[CachePage]) -> None:
        for page in pages:
            self.table.sub_ref(page)

    def _finish(self, job: Job) -> None:
        for seq in job.sequences:
            self._drop_pages(seq.pages)
            seq.pages = []
        if job.checkpoint is not None:
            self._drop_pages(job.checkpoint)
            job.checkpoint = None
        if job.ticket >= 0:
            self.filters.hand_in(job.ticket)
            job.ticket = -1

    def cancel(self, job: Job) -> None:
        if job in self.active:
            self.active.remove(job)
            self._finish(job)
        elif job in self.pending:
            self.pending.remove(job)

    def step(self) -> list[int]:
        finished: list[int] = []
        for job in list(self.active):
            job.produced += 1
            if job.produced >= job.max_new:
                self.active.remove(job)
                self._finish(job)
                finished.append(job.serial)
        return finished

    def banned_tokens(self, words: list[str]) -> list[int]:
        out: list[int] = []
        for word in words:
            ticket = self.filters.draw()  # leak: an empty word continues without handing its ticket in
            if ticket < 0:
                break
            if not word:
                continue
            out.append(hash((word, ticket)))
            self.filters.hand_in(ticket)
        return out

    def defrag(self, want: int) -> int:
        spare = self.table.grab_up_to(want)  # leak: a sole page is not worth the move and is left behind by the early return
        if len(spare) < 2:
            return 0
        for page in spare:
            self.table.sub_ref(page)
        return len(spare)

    def scratch_pages(self, count: int) -> Iterator[CachePage]:
        pages = self.table.grab_up_to(count)  # clean: near miss, an abandoned generator drops the pages in its finally
        try:
            for page in pages:
                yield page
        finally:
            self._drop_pages(pages)
