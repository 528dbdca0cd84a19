"""Continuous batching scheduler. Batch slots are bits of an int; KV space is a counter of pages."""

import collections
import dataclasses
import enum
import logging
import typing as t

logger = logging.getLogger("scheduler")


class SlotMask:
    def __init__(self, width: int):
        self.width = width
        self.mask = (1 << width) - 1

    def grab(self) -> int:
        if not self.mask:
            return -1
        low = self.mask & -self.mask
        self.mask ^= low
        return low.bit_length() - 1

    def drop(self, slot: int) -> None:
        self.mask |= 1 << slot

    def __len__(self):
        return self.mask.bit_count()


class PageLedger:
    def __init__(self, total: int):
        self.free = total

    def charge(self, n: int) -> bool:
        if n > self.free:
            return False
        self.free -= n
        return True

    def refund(self, n: int) -> None:
        self.free += n


class Quota:
    """Per-tenant concurrency, over a shared ledger: a wrapper that charges both."""

    def __init__(self, ledger: PageLedger, per_tenant: int):
        self.ledger = ledger
        self.per_tenant = per_tenant
        self.used = collections.Counter()

    def charge(self, tenant: str, n: int) -> bool:
        if not self.ledger.charge(n):  # leak: not refunded when the tenant is over its share
            return False
        if self.used[tenant] + n > self.per_tenant:
            return False
        self.used[tenant] += n
        return True

    def charge_soft(self, tenant: str, n: int) -> bool:
        """Like charge, but a tenant may go over its share while half of the pages are free."""
        if self.used[tenant] + n > self.per_tenant and self.ledger.free < n * 2:
            return False
        if not self.ledger.charge(n):  # clean: counted to the tenant, refund() gives both back
            return False
        self.used[tenant] += n
        return True

    def refund(self, tenant: str, n: int) -> None:
        self.used[tenant] -= n
        self.ledger.refund(n)


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    DONE = "done"


@dataclasses.dataclass(eq=False)
class Job:
    rid: str
    tenant: str
    prompt: int
    max_new: int
    slot: int = -1
    pages: int = 0
    produced: int = 0
    state: State = State.WAITING
    beam_slots: t.List[int] = dataclasses.field(default_factory=list)


class Scheduler:
    PAGE = 16

    def __init__(self, width: int, ledger: PageLedger, quota: t.Optional[Quota] = None):
        self.slots = SlotMask(width)
        self.ledger = ledger
        self.quota = quota
        self.waiting: t.Deque[Job] = collections.deque()
        self.running: t.List[Job] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    # -- admission --------------------------------------------------------

    def _pay(self, job: Job, n: int) -> bool:
        if self.quota is not None:
            paid = self.quota.charge_soft(job.tenant, n)  # clean: near miss, _unpay() refunds it under the same condition
        else:
            paid = self.ledger.charge(n)  # clean: near miss, _unpay() refunds it under the same condition
        if paid:
            job.pages += n
        return paid

    def _unpay(self, job: Job) -> None:
        if self.quota is not None:
            self.quota.refund(job.tenant, job.pages)
        else:
            self.ledger.refund(job.pages)
        job.pages = 0

    def admit(self) -> t.List[Job]:
        new = []
        while self.waiting:
            job = self.waiting[0]
            slot = self.slots.grab()  # clean: dropped when the pages cannot be paid, else held by the job
            if slot < 0:
                break
            if not self._pay(job, -(-job.prompt // self.PAGE)):  # clean: held by the job until retire()
                self.slots.drop(slot)
                break
            self.waiting.popleft()
            job.slot = slot
            job.state = State.RUNNING
            self.running.append(job)
            new.append(job)
        return new

    def admit_skipping(self, lookahead: int) -> t.List[Job]:
        """Out of order: jobs that do not fit are passed over."""
        new = []
        for job in list(self.waiting)[:lookahead]:
            slot = self.slots.grab()  # leak: a job that does not fit is passed over with its slot grabbed
            if slot < 0:
                break
            if not self._pay(job, -(-job.prompt // self.PAGE)):  # clean: held by the job until retire()
                continue
            self.waiting.remove(job)
            job.slot, job.state = slot, State.RUNNING
            self.running.append(job)
            new.append(job)
        return new

    def admit_beams(self, job: Job, beams: int) -> bool:
        got = []
        for _ in range(beams):
            s = self.slots.grab()  # clean: near miss, all are dropped after the loop when they fall short
            if s < 0:
                break
            got.append(s)
        if len(got) < beams or not self._pay(job, beams * -(-job.prompt // self.PAGE)):  # clean: held by the job until retire()
            for s in got:
                self.slots.drop(s)
            return False
        job.beam_slots = got
        job.state = State.RUNNING
        self.running.append(job)
        return True

    def admit_twin(self, a: Job, b: Job) -> bool:
        """Prompt and negative prompt run in step, so both are admitted or none is."""
        sa = self.slots.grab()  # clean: dropped when the second slot is missing or the pages are
        if sa < 0:
            return False
        sb = self.slots.grab()  # clean: dropped when the pages are missing
        if sb < 0:
            self.slots.drop(sa)
            return False
        if not self._pay(a, -(-a.prompt // self.PAGE)):  # leak: the first job's pages are not refunded when the second cannot pay
            self.slots.drop(sa)
            self.slots.drop(sb)
            return False
        if not self._pay(b, -(-b.prompt // self.PAGE)):  # clean: held by the job until retire()
            self.slots.drop(sa)
            self.slots.drop(sb)
            a.pages = 0
            return False
        a.slot, b.slot = sa, sb
        for j in (a, b):
            j.state = State.RUNNING
            self.running.append(j)
        return True

    # -- a step -----------------------------------------------------------

    def grow(self) -> t.List[Job]:
        """Charge a page for each job that crosses a page border; preempts from the tail."""
        preempted = []
        for job in list(self.running):
            if job.state is not State.RUNNING:
                continue
            if (job.prompt + job.produced) % self.PAGE:
                continue
            while not self._pay(job, 1):  # clean: near miss, counted in job.pages and refunded with the rest
                victim = self.running[-1]
                self.preempt(victim)
                preempted.append(victim)
                if victim is job:
                    break
        return preempted

    def preempt(self, job: Job) -> None:
        self._release(job)
        job.state = State.PREEMPTED
        self.running.remove(job)
        self.waiting.appendleft(job)

    def compact(self) -> int:
        """Move jobs to lower slots; returns the number moved."""
        moved = 0
        for job in sorted(self.running, key=lambda j: -j.slot):
            low = self.slots.grab()  # leak: a slot that is higher than the job's own is not dropped before break
            if low < 0 or low > job.slot:
                break
            self.slots.drop(job.slot)
            job.slot = low
            moved += 1
        return moved

    def dummy_run(self, n: int) -> int:
        """Take part in a collective with a padded batch."""
        pad = [s for s in (self.slots.grab() for _ in range(n)) if s >= 0]  # leak: the padding slots are never dropped
        logger.debug("padded with %d", len(pad))
        return len(pad)

    # -- end --------------------------------------------------------------

    def _release(self, job: Job) -> None:
        if job.slot >= 0:
            self.slots.drop(job.slot)
            job.slot = -1
        while job.beam_slots:
            self.slots.drop(job.beam_slots.pop())
        self._unpay(job)

    def retire(self, job: Job) -> None:
        self._release(job)
        job.state = State.DONE
        self.running.remove(job)
