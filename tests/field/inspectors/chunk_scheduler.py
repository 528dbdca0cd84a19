"""Chunked-prefill scheduler: in-flight token ledger and batch rows."""
from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Optional


class TokenLedger:
    def __init__(self, ceiling: int) -> None:
        self.left = ceiling

    def debit(self, count: int) -> bool:
        if count > self.left:
            return False
        self.left -= count
        return True

    def debit_upto(self, count: int) -> int:
        granted = min(count, self.left)
        self.left -= granted
        return granted

    def credit(self, count: int) -> None:
        self.left += count


class RowMap:
    """Batch rows; the lowest free row goes first to keep the batch dense."""

    def __init__(self, rows: int) -> None:
        self._rows = list(range(rows))

    def sit(self) -> Optional[int]:
        return heapq.heappop(self._rows) if self._rows else None

    def stand(self, row: int) -> None:
        heapq.heappush(self._rows, row)


@dataclass(eq=False)
class Job:
    prompt_len: int
    computed: int = 0
    charged: int = 0
    image_charged: int = 0
    row: Optional[int] = None
    paused: bool = False
    finished: bool = False


class ChunkScheduler:
    def __init__(self, tokens: int, images: int, rows: int) -> None:
        self.ledger = TokenLedger(tokens)
        self.images = TokenLedger(images)
        self.rows = RowMap(rows)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def schedule_prefill(self) -> list[Job]:
        batch = []
        while self.waiting:
            job = self.waiting[0]
            row = self.rows.sit()  # leak: an exhausted ledger breaks with the row in hand
            if row is None:
                break
            chunk = self.ledger.debit_upto(job.prompt_len - job.computed)  # clean: kept in job.charged, settled per step
            if chunk == 0:
                break
            job.row = row
            job.charged += chunk
            self.waiting.popleft()
            self.running.append(job)
            batch.append(job)
        return batch

    def schedule_decode(self) -> list[Job]:
        batch = []
        for job in self.running:
            if not self.ledger.debit(1):  # leak: a paused job is skipped after the debit
                break
            if job.paused:
                continue
            job.charged += 1
            batch.append(job)
        return batch

    def admit_multimodal(self, job: Job, image_tokens: int) -> bool:
        row = self.rows.sit()  # clean: near miss, both refusals stand the row
        if row is None:
            return False
        if not self.ledger.debit(job.prompt_len):  # clean: near miss, credited when the image ledger refuses
            self.rows.stand(row)
            return False
        if image_tokens and not self.images.debit(image_tokens):  # clean: kept in job.image_charged
            self.ledger.credit(job.prompt_len)
            self.rows.stand(row)
            return False
        job.row, job.charged, job.image_charged = row, job.prompt_len, image_tokens
        self.running.append(job)
        return True

    def compact(self, job: Job) -> None:
        """Move a job to a lower row if there is one."""
        lower = self.rows.sit()  # leak: a higher row than the present one is dropped
        if lower is not None and lower < job.row:
            old, job.row = job.row, lower
            self.rows.stand(old)

    def pause(self, job: Job) -> None:
        job.paused = True

    def resume(self, job: Job) -> None:
        if job.paused:
            job.paused = False
            job.row = self.rows.sit()  # leak: overwrites the row a paused job still holds

    def dummy_batch(self, width: int, runner) -> None:
        rows = [self.rows.sit() for _ in range(width)]  # clean: near miss, every non-None row stands again
        runner.warm_up([r for r in rows if r is not None])
        for row in rows:
            if row is not None:
                self.rows.stand(row)

    def profile_prefill(self, length: int, runner) -> Optional[float]:
        granted = self.ledger.debit_upto(length)  # leak: a shorter grant returns without credit
        if granted < length:
            return None
        elapsed = runner.time_prefill(granted)
        self.ledger.credit(granted)
        return elapsed

    def step_done(self, batch: list[Job]) -> None:
        for job in batch:
            job.computed += job.charged
            self._settle(job)
            if job.finished:
                self.running.remove(job)
                self._leave_row(job)

    def preempt(self, job: Job) -> None:
        self.running.remove(job)
        self._settle(job)
        self._leave_row(job)
        job.computed = 0
        self.waiting.appendleft(job)

    def _settle(self, job: Job) -> None:
        self.ledger.credit(job.charged)
        self.images.credit(job.image_charged)
        job.charged = job.image_charged = 0

    def _leave_row(self, job: Job) -> None:
        if job.row is not None:
            self.rows.stand(job.row)
            job.row = None
