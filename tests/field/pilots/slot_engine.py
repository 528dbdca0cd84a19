from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional

import torch
from torch import Tensor

_ids = itertools.count()


class PageTable:
    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self._free: set[int] = set(range(num_pages))

    def reserve(self, n: int) -> list[int]:
        if n > len(self._free):
            return []
        return [self._free.pop() for _ in range(n)]

    def release(self, pages: list[int]) -> None:
        self._free.update(pages)


class SlotAllocator:
    def __init__(self, n: int):
        self._free = list(range(n))

    def get(self) -> Optional[int]:
        return self._free.pop() if self._free else None

    def put(self, slot: int) -> None:
        self._free.append(slot)


@dataclass
class Job:
    prompt: list[int]
    max_new: int
    job_id: int = field(default_factory=lambda: next(_ids))
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    overflow: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    eos: bool = False


class DecodeEngine:
    def __init__(self, forward: Callable[[list[Job]], Tensor], pages: PageTable, slots: SlotAllocator, eos_id: int):
        self.forward = forward
        self.pages = pages
        self.slots = slots
        self.eos_id = eos_id
        self.jobs: dict[int, Job] = {}
        self.pending: list[Job] = []

    def enqueue(self, job: Job) -> None:
        self.pending.append(job)

    def _start(self, job: Job) -> bool:
        slot = self.slots.get()  # clean: near miss, a lack of pages puts it back and retire() does otherwise
        if slot is None:
            return False
        pages = self.pages.reserve(-(-len(job.prompt) // self.pages.page_size))  # clean: moves into the job, retire() releases
        if not pages:
            self.slots.put(slot)
            return False
        job.slot, job.pages = slot, pages
        self.jobs[job.job_id] = job
        return True

    def _grow(self, job: Job) -> bool:
        total = len(job.prompt) + len(job.output)
        if total < len(job.pages) * self.pages.page_size:
            return True
        extra = self.pages.reserve(1)  # clean: near miss, an empty list is no holding and a page extends job.pages
        if not extra:
            return False
        job.pages.extend(extra)
        return True

    def reserve_overflow(self, job: Job, n: int) -> bool:
        if job.overflow:
            return True
        job.overflow = self.pages.reserve(n)  # leak: retire() releases pages only, the overflow goes with the job
        return bool(job.overflow)

    def retire(self, job: Job) -> None:
        self.jobs.pop(job.job_id, None)
        self.pages.release(job.pages)
        job.pages = []
        self.slots.put(job.slot)
        job.slot = -1

    def pause(self, job: Job) -> None:
        del self.jobs[job.job_id]
        self.slots.put(job.slot)
        job.slot = -1
        self.pages.release(job.pages)
        job.pages = []
        self.pending.insert(0, job)

    def step(self) -> list[Job]:
        while self.pending and self._start(self.pending[0]):
            self.pending.pop(0)
        active = list(self.jobs.values())
        logits = self.forward(active)
        finished: list[Job] = []
        for job, row in zip(active, logits):
            token = int(row.argmax())
            job.output.append(token)
            job.eos = token == self.eos_id
            if job.eos or len(job.output) >= job.max_new:
                self.retire(job)
                finished.append(job)
            elif not self._grow(job):
                self.pause(job)
        return finished

    def score(self, prompts: list[list[int]]) -> list[float]:
        scores: list[float] = []
        for prompt in prompts:
            slot = self.slots.get()  # leak: without pages the loop breaks and the slot of this prompt stays out
            if slot is None:
                break
            pages = self.pages.reserve(-(-len(prompt) // self.pages.page_size))  # clean: near miss, the break is taken only for an empty list
            if not pages:
                break
            job = Job(prompt, 0, slot=slot, pages=pages)
            scores.append(float(self.forward([job])[0].max()))
            self.pages.release(pages)
            self.slots.put(slot)
        return scores

    def beam(self, prompt: list[int], width: int) -> Optional[list[int]]:
        beams: list[Job] = []
        for _ in range(width):
            slot = self.slots.get()  # clean: near miss, the finally puts back the slots of all beams made
            if slot is None:
                break
            beams.append(Job(list(prompt), 16, slot=slot))
        try:
            if len(beams) < width:
                return None
            logits = self.forward(beams)
            return [int(t) for t in logits[0].topk(width).indices]
        finally:
            for b in beams:
                self.slots.put(b.slot)

    def stream(self, prompt: list[int], max_new: int) -> Iterator[int]:
        slot = self.slots.get()  # clean: near miss, the finally covers exhaustion, the stop token and close()
        if slot is None:
            return
        job = Job(prompt, max_new, slot=slot)
        try:
            for _ in range(max_new):
                token = int(self.forward([job])[0].argmax())
                if token == self.eos_id:
                    return
                job.output.append(token)
                yield token
        finally:
            self.slots.put(slot)

    def defragment(self, job: Job) -> bool:
        fresh = self.pages.reserve(len(job.pages))  # leak: when the order is good already it returns with the fresh pages
        if not fresh:
            return False
        if job.pages == sorted(job.pages):
            return True
        self.pages.release(job.pages)
        job.pages = fresh
        return True

    def rebase(self, job: Job, n: int) -> None:
        job.pages = self.pages.reserve(n)  # leak: the pages the job had are overwritten
        job.output.clear()
