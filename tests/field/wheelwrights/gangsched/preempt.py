from __future__ import annotations

from typing import Callable

from .leases import HostLeases, Lease
from .runner import GangJob, GangRunner


class Preemptor:
    def __init__(self, runner: GangRunner) -> None:
        self.runner = runner
        self.leases: HostLeases = runner.leases

    def census(self) -> dict[str, int] | None:
        if not self.leases.freeze(timeout=2.0):  # clean: thawed in finally
            return None
        try:
            return {name: self.runner.table.held(name) for name in self.runner.jobs}
        finally:
            self.leases.thaw()

    def make_room(self, need: int, victims: list[GangJob]) -> bool:
        if not self.leases.freeze(timeout=2.0):  # leak: returning for want of victims skips thaw
            return False
        freed = 0
        chosen = []
        for v in victims:
            if freed >= need:
                break
            freed += self.runner.table.held(v.name)
            chosen.append(v)
        if freed < need:
            return False
        for v in chosen:
            self.runner.abort(v)
        self.leases.thaw()
        return True

    def swap(self, out: GangJob, host: str, slots: int, start: Callable[[Lease], bool]) -> bool:
        self.runner.abort(out)
        lease = self.leases.issue(host, slots)  # clean: near miss, surrendered when start refuses it, else held
        if lease is None:
            return False
        if not start(lease):
            self.leases.surrender(lease)
            return False
        self.runner.table.hold(f"{out.name}/swap", lease)
        return True

    def mirror(self, left: str, right: str, slots: int, job: str) -> bool:
        a = self.leases.issue(left, slots)  # leak: not surrendered when the right host is full
        if a is None:
            return False
        b = self.leases.issue(right, slots)  # clean: held by the table
        if b is None:
            return False
        self.runner.table.hold(job, a)
        self.runner.table.hold(job, b)
        return True
