from dataclasses import dataclass, field
from enum import Enum


class QuotaLedger:
    def __init__(self, total):
        self.total = total
        self.used = {}

    def charge(self, tenant, amount):
        if sum(self.used.values()) + amount > self.total:
            return None
        self.used[tenant] = self.used.get(tenant, 0) + amount
        return tenant, amount

    def refund(self, ticket):
        tenant, amount = ticket
        self.used[tenant] -= amount


class State(Enum):
    QUEUED = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4


@dataclass
class Job:
    name: str
    tenant: str
    cores: int
    state: State = State.QUEUED
    tickets: list = field(default_factory=list)
    scratch: tuple = None


class Scheduler:
    def __init__(self, cpu, disk):
        self.cpu = cpu
        self.disk = disk
        self.jobs = {}

    def submit(self, job):
        if job.name in self.jobs:
            return False
        self.jobs[job.name] = job
        return True

    def start(self, name):
        job = self.jobs[name]
        if job.state is not State.QUEUED:
            return False
        ticket = self.cpu.charge(job.tenant, job.cores)  # clean: _settle refunds all tickets of the job
        if ticket is None:
            return False
        job.tickets.append(ticket)
        job.scratch = self.disk.charge(job.tenant, job.cores * 10)  # leak: fail settles only the cpu tickets
        job.state = State.RUNNING
        return True

    def grow(self, name, extra):
        job = self.jobs[name]
        if job.state is not State.RUNNING:
            return False
        ticket = self.cpu.charge(job.tenant, extra)  # clean: joins the tickets that _settle refunds
        if ticket is not None:
            job.tickets.append(ticket)
        return ticket is not None

    def _settle(self, job):
        while job.tickets:
            self.cpu.refund(job.tickets.pop())

    def complete(self, name):
        job = self.jobs.pop(name)
        self._settle(job)
        if job.scratch is not None:
            self.disk.refund(job.scratch)
        job.state = State.DONE

    def fail(self, name, reason):
        job = self.jobs.pop(name)
        self._settle(job)
        job.state = State.FAILED
        return "%s: %s" % (job.name, reason)
