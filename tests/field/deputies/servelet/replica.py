from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Callable, Iterator

from .quota import SlotMap

logger = logging.getLogger(__name__)


@dataclass
class Job:
    rid: str
    prompt: list[int]
    limit: int
    slot: int = -1
    out: list[int] = field(default_factory=list)


class Replica:
    """Runs jobs slot by slot; step_fn answers None when the model refuses a job."""

    def __init__(self, n_slots: int, step_fn: Callable[[int, list[int]], int | None]) -> None:
        self.slots = SlotMap(n_slots)
        self.step_fn = step_fn
        self.jobs: dict[str, Job] = {}
        self.paused: dict[str, Job] = {}

    def add(self, job: Job) -> bool:
        if job.rid in self.jobs or job.rid in self.paused:
            return False
        slot = self.slots.claim()  # clean: minus one is refused, otherwise carried by the job until _end
        if slot < 0:
            return False
        job.slot = slot
        self.jobs[job.rid] = job
        return True

    def _end(self, job: Job) -> None:
        self.slots.unclaim(job.slot)
        job.slot = -1

    def step(self) -> Iterator[tuple[str, int]]:
        for job in list(self.jobs.values()):
            tok = self.step_fn(job.slot, job.prompt + job.out)
            if tok is None:
                del self.jobs[job.rid]
                self._end(job)
                continue
            job.out.append(tok)
            if len(job.out) >= job.limit:
                del self.jobs[job.rid]
                self._end(job)
            yield job.rid, tok

    def pause(self, rid: str) -> None:
        job = self.jobs.pop(rid)
        self._end(job)
        self.paused[rid] = job

    def resume(self, rid: str) -> bool:
        slot = self.slots.claim()  # leak: a rid that is not paused returns False with the slot claimed
        if slot < 0:
            return False
        job = self.paused.pop(rid, None)
        if job is None:
            return False
        job.slot = slot
        self.jobs[rid] = job
        return True

    def cancel(self, rid: str) -> bool:
        self.paused.pop(rid, None)
        job = self.jobs.pop(rid, None)
        if job is None:
            return False
        self._end(job)
        return True

    def score(self, prompts: list[list[int]]) -> list[int | None]:
        out: list[int | None] = []
        for p in prompts:
            slot = self.slots.claim()  # clean: near miss, a refusal is stored as None and the slot unclaimed all the same
            if slot < 0:
                out.append(None)
                continue
            out.append(self.step_fn(slot, p))
            self.slots.unclaim(slot)
        return out

    def warm(self, prompts: list[list[int]]) -> int:
        slot = -1
        done = 0
        for p in prompts:
            slot = self.slots.claim()  # leak: one per prompt is claimed, while only the last is unclaimed after the loop
            if slot < 0:
                break
            if self.step_fn(slot, p) is not None:
                done += 1
        if slot >= 0:
            self.slots.unclaim(slot)
        return done
