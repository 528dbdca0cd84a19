from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .slots import GpuSlots, Slot


@dataclass
class Job:
    jid: int
    adapter: str | None
    prompt: str
    slot: Slot | None = None
    out: list[str] = field(default_factory=list)
    max_new: int = 8


class Batcher:
    def __init__(self, slots: GpuSlots, width: int) -> None:
        self.slots = slots
        self.width = width
        self.queue: deque[Job] = deque()
        self.active: dict[int, Job] = {}

    def push(self, job: Job) -> None:
        self.queue.append(job)

    def form(self) -> list[Job]:
        deferred: list[Job] = []
        while self.queue and len(self.active) < self.width:
            job = self.queue.popleft()
            if job.adapter is not None:
                job.slot = self.slots.enlist(job.adapter)  # clean: near miss, the active job keeps it until retire or evict
                if job.slot is None:
                    deferred.append(job)
                    continue
            self.active[job.jid] = job
        self.queue.extendleft(reversed(deferred))
        return list(self.active.values())

    def form_urgent(self, job: Job) -> bool:
        slot = self.slots.enlist(job.adapter) if job.adapter else None  # leak: a full batch without a victim refuses the job after it was enlisted
        if job.adapter and slot is None:
            return False
        if len(self.active) >= self.width:
            victim = next((j for j in self.active.values() if not j.out), None)
            if victim is None:
                return False
            self.evict(victim)
        job.slot = slot
        self.active[job.jid] = job
        return True

    def retire(self, job: Job) -> None:
        del self.active[job.jid]
        if job.slot is not None:
            self.slots.discharge(job.slot)
            job.slot = None

    def evict(self, job: Job) -> None:
        self.retire(job)
        self.queue.appendleft(job)

    def retarget(self, job: Job, adapter: str) -> bool:
        slot = self.slots.enlist(adapter)  # leak: job.slot is replaced and the user of the former slot stays counted
        if slot is None:
            return False
        job.adapter = adapter
        job.slot = slot
        return True

    def retarget_idle(self, job: Job, adapter: str) -> bool:
        if job.slot is not None:
            self.slots.discharge(job.slot)
            job.slot = None
        job.slot = self.slots.enlist(adapter)  # clean: near miss, the field was emptied before it is filled again
        job.adapter = adapter
        return job.slot is not None
