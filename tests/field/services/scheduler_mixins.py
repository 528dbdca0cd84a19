"""Scheduler assembled from mixins. Each mixin owns one resource."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional

logger = logging.getLogger("sched")


@dataclass
class Job:
    jid: int
    prompt: List[int]
    row: Optional[int] = None
    blocks: List[int] = field(default_factory=list)
    finished: bool = False


class RowMixin:
    max_rows = 64

    def __init__(self) -> None:
        super().__init__()
        self._rows = [True] * self.max_rows

    def acquire_row(self) -> int:
        for i, ok in enumerate(self._rows):
            if ok:
                self._rows[i] = False
                return i
        return -1

    def release_row(self, row: int) -> None:
        self._rows[row] = True


class BlockMixin:
    total_blocks = 512

    def __init__(self) -> None:
        super().__init__()
        self._blocks = list(range(self.total_blocks))

    def allocate_blocks(self, n: int) -> List[int]:
        if n > len(self._blocks):
            return []
        out, self._blocks = self._blocks[:n], self._blocks[n:]  # clean: handed out
        return out

    def free_blocks(self, blocks: List[int]) -> None:
        self._blocks.extend(blocks)

    def allocate_even(self, n: int) -> List[int]:
        out: List[int] = []
        while self._blocks and len(out) < n:
            b = self._blocks.pop()  # leak: blocks with an odd number are thrown away
            if b % 2:
                continue
            out.append(b)
        return out


class BaseScheduler(RowMixin, BlockMixin):
    def __init__(self, block_size: int = 16) -> None:
        super().__init__()
        self.block_size = block_size
        self.running: Dict[int, Job] = {}

    def blocks_for(self, job: Job) -> int:
        return max(1, -(-len(job.prompt) // self.block_size))

    def add(self, job: Job) -> bool:
        row = self.acquire_row()  # clean: near miss, -1 is no row; without blocks it is released, else it is in the job
        if row < 0:
            return False
        blocks = self.allocate_blocks(self.blocks_for(job))  # clean: in the job, remove() frees
        if not blocks:
            self.release_row(row)
            return False
        job.row, job.blocks = row, blocks
        self.running[job.jid] = job
        return True

    def remove(self, jid: int) -> None:
        job = self.running.pop(jid)
        if job.row is not None:
            self.release_row(job.row)
            job.row = None
        self.free_blocks(job.blocks)
        job.blocks = []

    def step(self) -> int:
        done = [j.jid for j in self.running.values() if j.finished]
        for jid in done:
            self.remove(jid)
        return len(done)


class EagerScheduler(BaseScheduler):
    """Takes the blocks first."""

    def add(self, job: Job) -> bool:
        blocks = self.allocate_blocks(self.blocks_for(job))  # leak: without a row it returns and keeps the blocks
        if not blocks:
            return False
        row = self.acquire_row()  # clean: -1, or in the job
        if row < 0:
            return False
        job.row, job.blocks = row, blocks
        self.running[job.jid] = job
        return True

    def add_all(self, jobs: List[Job]) -> int:
        n = 0
        for job in jobs:
            if not self.add(job):  # clean: a job that was added is running
                break
            n += 1
        return n


class ChunkedScheduler(BaseScheduler):
    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.draft_row: Optional[int] = None

    def extend(self, job: Job) -> bool:
        more = self.allocate_blocks(self.chunk)  # clean: near miss, appended to blocks the job has; [] when there are none
        job.blocks += more
        return bool(more)

    def shrink(self, job: Job, keep: int) -> None:
        self.free_blocks(job.blocks[keep:])
        job.blocks = job.blocks[:keep]

    def begin_draft(self) -> bool:
        if self.draft_row is not None:
            return True
        row = self.acquire_row()  # clean: near miss, only a valid row goes into the field and end_draft() releases it
        if row == -1:
            return False
        self.draft_row = row
        return True

    def end_draft(self) -> None:
        row, self.draft_row = self.draft_row, None
        if row is not None:
            self.release_row(row)

    def try_chunk(self, job: Job) -> int:
        got = self.allocate_blocks(self.chunk)  # leak: keeps as many as the job needs and loses the rest
        need = self.blocks_for(job)
        job.blocks.extend(got[:need])
        return len(got[:need])

    def try_chunk_exact(self, job: Job) -> int:
        got = self.allocate_blocks(self.chunk)  # clean: near miss, the surplus is freed
        need = self.blocks_for(job)
        job.blocks.extend(got[:need])
        self.free_blocks(got[need:])
        return len(got[:need])

    def fits(self, job: Job) -> bool:
        return len(self.allocate_even(self.blocks_for(job))) > 0  # leak: the list is measured and dropped

    def swap_row(self, job: Job) -> None:
        new = self.acquire_row()  # leak: a job that has finished returns with the new row taken
        if new < 0 or job.finished:
            return
        if job.row is not None:
            self.release_row(job.row)
        job.row = new


def admit_until_full(s: BaseScheduler, jobs: List[Job]) -> List[Job]:
    left: List[Job] = []
    for job in jobs:
        if not s.add(job):  # clean: running jobs are removed by step()
            left.append(job)
    return left


def measure(s: BaseScheduler, n: int) -> int:
    rows = []
    for _ in range(n):
        r = s.acquire_row()  # clean: near miss, break at -1, then all are released
        if r < 0:
            break
        rows.append(r)
    try:
        return len(rows)
    finally:
        for r in rows:
            s.release_row(r)


def probe(s: BaseScheduler, job: Job) -> bool:
    row = s.acquire_row()  # leak: released only when the blocks were there
    blocks = s.allocate_blocks(s.blocks_for(job))  # clean: freed when any were got
    if row < 0 or not blocks:
        if blocks:
            s.free_blocks(blocks)
        return False
    s.free_blocks(blocks)
    s.release_row(row)
    return True
