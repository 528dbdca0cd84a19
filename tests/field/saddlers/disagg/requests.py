from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional

from .capacity import Fleet, Lease


@dataclass
class Job:
    job_id: str
    prompt: List[int]
    max_new: int = 16
    priority: int = 0
    window: Optional[Lease] = None
    sub_windows: Dict[int, Lease] = field(default_factory=dict)
    owns_window: bool = True


class JobTable:
    def __init__(self, fleet: Fleet, max_jobs: int = 8) -> None:
        self.fleet = fleet
        self.max_jobs = max_jobs
        self.jobs: Dict[str, Job] = {}

    def submit(self, job: Job) -> bool:
        if job.job_id in self.jobs:
            return False
        window = self.fleet.place(len(job.prompt) + job.max_new)  # leak: a full table refuses the job after placing it
        if window is None:
            return False
        if len(self.jobs) >= self.max_jobs:
            return False
        job.window = window
        self.jobs[job.job_id] = job
        return True

    def submit_checked(self, job: Job) -> bool:
        if job.job_id in self.jobs or len(self.jobs) >= self.max_jobs:
            return False
        job.window = self.fleet.place(len(job.prompt) + job.max_new)  # clean: moved into the job, retire unplaces it
        if job.window is None:
            return False
        self.jobs[job.job_id] = job
        return True

    def clone(self, job: Job, new_id: str) -> Job:
        """Uses the window of ``job``, which outlives it."""
        if new_id in self.jobs:
            raise KeyError(new_id)
        twin = Job(new_id, list(job.prompt), job.max_new, window=job.window, owns_window=False)
        self.jobs[new_id] = twin
        return twin

    def sample_n(self, job: Job, n: int) -> int:
        for i in range(n):
            sub = self.fleet.place(job.max_new)  # clean: near miss, sub_windows holds it and retire unplaces all of them
            if sub is None:
                return i
            job.sub_windows[len(job.sub_windows)] = sub
        return n

    def retire(self, job_id: str) -> None:
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        for sub in job.sub_windows.values():
            self.fleet.unplace(sub)
        job.sub_windows.clear()
        if job.window is not None and job.owns_window:
            self.fleet.unplace(job.window)
        job.window = None

    def run_inline(self, job: Job) -> int:
        """Small jobs: no table entry at all."""
        window = self.fleet.place(len(job.prompt))  # leak: zero max_new returns without unplacing
        if window is None:
            return -1
        if job.max_new == 0:
            return 0
        steps = min(job.max_new, len(window.pages) * 16)
        self.fleet.unplace(window)
        return steps
