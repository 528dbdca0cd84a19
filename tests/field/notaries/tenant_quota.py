"""Admission helpers that reserve for their caller and answer by bool, enum, None or tuple."""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)


class Verdict(enum.Enum):
    GRANTED = "granted"
    BURST = "burst"
    DENIED = "denied"


class Quota:
    def __init__(self, limits: dict[str, int], burst: int) -> None:
        self._left = dict(limits)
        self._burst = burst

    def reserve(self, tenant: str, units: int) -> bool:
        if self._left.get(tenant, 0) < units:
            return False
        self._left[tenant] -= units
        return True

    def unreserve(self, tenant: str, units: int) -> None:
        self._left[tenant] += units

    def reserve_burst(self, units: int) -> bool:
        if self._burst < units:
            return False
        self._burst -= units
        return True

    def unreserve_burst(self, units: int) -> None:
        self._burst += units


class DeviceSlots:
    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def grab(self) -> int | None:
        return self._free.pop(0) if self._free else None

    def put(self, slot: int) -> None:
        self._free.insert(0, slot)


class TokenShop:
    def __init__(self, standing: dict[str, str]) -> None:
        self._cached = dict(standing)
        self._issued: set[str] = set()

    def issue(self, tenant: str) -> str:
        token = f"{tenant}-{len(self._issued)}"
        self._issued.add(token)
        return token

    def revoke(self, token: str) -> None:
        self._issued.discard(token)

    def cached(self, tenant: str) -> str | None:
        return self._cached.get(tenant)


@dataclass
class Job:
    tenant: str
    units: int
    dry_run: bool = False
    label: str = ""


class Gate:
    def __init__(self, quota: Quota, slots: DeviceSlots, tokens: TokenShop, runner) -> None:
        self.quota = quota
        self.slots = slots
        self.tokens = tokens
        self.runner = runner

    # helpers: what they took is the caller's, and the answer says so

    def admit(self, job: Job) -> Verdict:
        if self.quota.reserve(job.tenant, job.units):  # clean: GRANTED tells the caller that he holds it
            return Verdict.GRANTED
        if self.quota.reserve_burst(job.units):  # clean: BURST tells the caller that he holds it
            return Verdict.BURST
        return Verdict.DENIED

    def ensure_token(self, tenant: str) -> tuple[str, bool]:
        if (known := self.tokens.cached(tenant)) is not None:
            return known, False
        return self.tokens.issue(tenant), True  # clean: near miss, the bool says that it is the caller's

    def place(self, job: Job) -> int | None:
        if job.dry_run:
            return None
        return self.slots.grab()  # clean: handed to the caller

    def reserve_pair(self, first: Job, second: Job) -> bool:
        if not self.quota.reserve(first.tenant, first.units):  # clean: near miss, undone if the second fails
            return False
        if not self.quota.reserve(second.tenant, second.units):  # clean: True gives both to the caller
            self.quota.unreserve(first.tenant, first.units)
            return False
        return True

    def reserve_with_burst(self, job: Job, extra: int) -> bool:
        if not self.quota.reserve(job.tenant, job.units):  # leak: False after the burst fails keeps this one
            return False
        if extra > 0 and not self.quota.reserve_burst(extra):  # clean: True gives it to the caller
            log.info("no burst left for %s", job.label)
            return False
        return True

    # callers

    def submit(self, job: Job) -> str:
        match self.admit(job):  # clean: near miss, each granting verdict has its own undo
            case Verdict.DENIED:
                return "retry later"
            case Verdict.GRANTED:
                try:
                    return self.runner.run(job)
                finally:
                    self.quota.unreserve(job.tenant, job.units)
            case Verdict.BURST:
                try:
                    return self.runner.run_low_priority(job)
                finally:
                    self.quota.unreserve_burst(job.units)

    def submit_many(self, jobs: list[Job]) -> list[str]:
        results = []
        for job in jobs:
            verdict = self.admit(job)  # leak: a BURST verdict is run but never given back
            if verdict is Verdict.DENIED:
                results.append("denied")
                continue
            results.append(self.runner.run(job))
            if verdict is Verdict.GRANTED:
                self.quota.unreserve(job.tenant, job.units)
        return results

    def estimate(self, job: Job) -> float:
        if self.admit(job) is Verdict.DENIED:  # leak: an admitted dry run returns its price and keeps it
            return float("inf")
        if job.dry_run:
            return job.units * 0.5
        cost = self.runner.cost(job)
        self._undo(job)
        return cost

    def _undo(self, job: Job) -> None:
        self.quota.unreserve(job.tenant, job.units)

    def run_pair(self, first: Job, second: Job) -> bool:
        if not self.reserve_pair(first, second):  # clean: near miss, False means that nothing is held
            return False
        try:
            self.runner.run(first)
            self.runner.run(second)
        finally:
            self.quota.unreserve(first.tenant, first.units)
            self.quota.unreserve(second.tenant, second.units)
        return True

    def run_placed(self, job: Job) -> str:
        slot = self.place(job)  # leak: slot number 0 is falsy, so it is never put back
        outcome = self.runner.run_on(job, slot if slot else 0)
        if slot:
            self.slots.put(slot)
        return outcome

    def run_pinned(self, job: Job) -> str:
        slot = self.place(job)  # clean: near miss, tested against None, so slot 0 is put back
        if slot is None:
            return self.runner.run(job)
        outcome = self.runner.run_on(job, slot)
        self.slots.put(slot)
        return outcome

    def describe(self, tenant: str) -> dict[str, object]:
        token, created = self.ensure_token(tenant)  # clean: near miss, revoked here if made here
        info = self.runner.describe(tenant, token)
        if created:
            self.tokens.revoke(token)
        return {"tenant": tenant, **info}

    def usage(self, tenants: list[str]) -> dict[str, int]:
        out: dict[str, int] = {}
        for tenant in tenants:
            token, _ = self.ensure_token(tenant)  # leak: a freshly issued token is never revoked
            out[tenant] = self.runner.usage(tenant, token)
        return out
