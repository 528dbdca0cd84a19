from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass, field

from .leases import HostLeases, Lease
from .store import LeaseTable

log = logging.getLogger(__name__)


@dataclass
class GangJob:
    name: str
    want: dict[str, int]
    argv: list[str]
    procs: list[subprocess.Popen] = field(default_factory=list)


class GangRunner:
    def __init__(self, leases: HostLeases, table: LeaseTable) -> None:
        self.leases = leases
        self.table = table
        self.jobs: dict[str, GangJob] = {}

    def launch(self, job: GangJob) -> bool:
        gang = self.leases.issue_gang(job.want)  # clean: near miss, held by the table before the first spawn can fail
        if gang is None:
            return False
        for lease in gang:
            self.table.hold(job.name, lease)
        for lease in gang:
            if not self._spawn(job, lease):
                self.abort(job)
                return False
        self.jobs[job.name] = job
        return True

    def launch_single(self, job: GangJob, slots: int) -> bool:
        lease = self.leases.issue_anywhere(slots)  # leak: a failed spawn returns before hold or surrender
        if lease is None:
            return False
        if not self._spawn(job, lease):
            return False
        self.table.hold(job.name, lease)
        self.jobs[job.name] = job
        return True

    def _spawn(self, job: GangJob, lease: Lease) -> bool:
        try:
            job.procs.append(subprocess.Popen(["ssh", lease.host, *job.argv]))
        except OSError:
            log.exception("spawn on %s", lease.host)
            return False
        return True

    def abort(self, job: GangJob) -> None:
        for p in job.procs:
            p.kill()
        self.table.settle_job(job.name)

    def reap(self) -> None:
        for name, job in list(self.jobs.items()):
            if all(p.poll() is not None for p in job.procs):
                del self.jobs[name]
                self.table.settle_job(name)

    def run_script(self, host: str, argv: list[str], attempts: int = 2) -> int:
        rc = -1
        for _ in range(attempts):
            lease = self.leases.issue(host, 1)  # clean: surrendered in finally before each retry
            if lease is None:
                break
            try:
                rc = subprocess.call(["ssh", lease.host, *argv])
            finally:
                self.leases.surrender(lease)
            if rc == 0:
                break
        return rc
