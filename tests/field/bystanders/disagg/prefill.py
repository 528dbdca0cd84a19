"""Prefill worker: computes KV, ships it, frees its pages."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from .pool import PageList, PagePool, alloc_or_raise, round_up, split

logger = logging.getLogger(__name__)


@dataclass
class PrefillJob:
    rid: str
    prompt: List[int]
    pages: Optional[PageList] = None
    shipped: int = 0


class PrefillWorker:
    def __init__(self, pool: PagePool, model: Any, link: Any, page_size: int = 16) -> None:
        self.pool = pool
        self.model = model
        self.link = link
        self.page_size = page_size
        self.jobs: Dict[str, PrefillJob] = {}

    def start(self, job: PrefillJob) -> None:
        job.pages = alloc_or_raise(self.pool, round_up(len(job.prompt), self.page_size))  # clean: the job holds them until done or cancel
        self.jobs[job.rid] = job
        self.model.prefill(job.prompt, job.pages)

    def ship(self, rid: str) -> bool:
        job = self.jobs[rid]
        if not self.link.ready(rid):
            return False
        self.link.send(rid, job.pages)
        self.done(rid)
        return True

    def done(self, rid: str) -> None:
        job = self.jobs.pop(rid)
        if job.pages is not None:
            self.pool.free_pages(job.pages)
            job.pages = None

    def cancel(self, rid: str) -> None:
        if rid in self.jobs:
            self.done(rid)

    def run_inline(self, job: PrefillJob) -> bool:
        pages = alloc_or_raise(self.pool, round_up(len(job.prompt), self.page_size))  # leak: a link that is not ready returns without freeing
        self.model.prefill(job.prompt, pages)
        if not self.link.ready(job.rid):
            logger.warning("decode side of %s not ready, prefill thrown away", job.rid)
            return False
        self.link.send(job.rid, pages)
        self.pool.free_pages(pages)
        return True

    def run_chunks(self, job: PrefillJob, chunk: int) -> int:
        total = 0
        for i in range(0, len(job.prompt), chunk):
            part = job.prompt[i:i + chunk]
            pages = self.pool.alloc_pages(round_up(len(part), self.page_size))  # clean: near miss, freed in each turn and break only for None
            if pages is None:
                break
            self.model.prefill(part, pages)
            self.link.send(job.rid, pages)
            self.pool.free_pages(pages)
            total += len(part)
        return total

    def ship_head(self, job: PrefillJob, head_tokens: int) -> None:
        pages = alloc_or_raise(self.pool, round_up(len(job.prompt), self.page_size))  # leak: only the head of the pages is freed
        self.model.prefill(job.prompt, pages)
        head, _tail = split(pages, round_up(head_tokens, self.page_size))
        self.link.send(job.rid, head)
        self.pool.free_pages(head)

    def ship_both(self, job: PrefillJob, head_tokens: int) -> None:
        pages = alloc_or_raise(self.pool, round_up(len(job.prompt), self.page_size))  # clean: near miss, head and tail are freed apart
        self.model.prefill(job.prompt, pages)
        head, tail = split(pages, round_up(head_tokens, self.page_size))
        self.link.send(job.rid, head)
        self.pool.free_pages(head)
        self.link.send(job.rid, tail)
        self.pool.free_pages(tail)
