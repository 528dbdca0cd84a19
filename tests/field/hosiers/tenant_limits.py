"""Per-tenant admission in the gateway: concurrency permits, quota reservations, weight-update lock."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Optional


class UpdateLock:
    """Requests hold it shared, a weight update exclusively."""

    def __init__(self) -> None:
        self._cv = threading.Condition()
        self._readers = 0
        self._writer = False

    def lock_shared(self) -> None:
        with self._cv:
            while self._writer:
                self._cv.wait()
            self._readers += 1

    def unlock_shared(self) -> None:
        with self._cv:
            self._readers -= 1
            self._cv.notify_all()

    def lock_exclusive(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        with self._cv:
            while self._writer or self._readers:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._cv.wait(left)
            self._writer = True
            return True

    def unlock_exclusive(self) -> None:
        with self._cv:
            self._writer = False
            self._cv.notify_all()


@dataclass
class Reservation:
    tenant: str
    tokens: int
    settled: bool = False


class Quota:
    """Token quota; a reservation must be committed or voided."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.spent: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self._mu = threading.Lock()

    def reserve(self, tenant: str, tokens: int) -> Optional[Reservation]:
        with self._mu:
            total = self.spent.get(tenant, 0) + self.reserved.get(tenant, 0)
            if total + tokens > self.limits.get(tenant, 0):
                return None
            self.reserved[tenant] = self.reserved.get(tenant, 0) + tokens
            return Reservation(tenant, tokens)

    def commit(self, r: Reservation, used: int) -> None:
        with self._mu:
            self.reserved[r.tenant] -= r.tokens
            self.spent[r.tenant] = self.spent.get(r.tenant, 0) + used
            r.settled = True

    def void(self, r: Reservation) -> None:
        with self._mu:
            self.reserved[r.tenant] -= r.tokens
            r.settled = True


class Permits:
    def __init__(self, per_tenant: int) -> None:
        self.per_tenant = per_tenant
        self._held: dict[str, int] = {}
        self._mu = threading.Lock()

    def enter(self, tenant: str) -> bool:
        with self._mu:
            if self._held.get(tenant, 0) >= self.per_tenant:
                return False
            self._held[tenant] = self._held.get(tenant, 0) + 1
            return True

    def exit(self, tenant: str) -> None:
        with self._mu:
            self._held[tenant] -= 1


@dataclass
class Ticket:
    tenant: str
    res: Reservation
    born: float = field(default_factory=time.monotonic)
    cancelled: bool = False


class Admission:
    def __init__(self, quota: Quota, permits: Permits, gate: UpdateLock) -> None:
        self.quota = quota
        self.permits = permits
        self.gate = gate
        self.tickets: dict[str, Ticket] = {}
        self.rejected = 0

    # ---- tickets -------------------------------------------------------------

    def admit(self, rid: str, tenant: str, tokens: int) -> bool:
        if not self.permits.enter(tenant):  # leak: without quota the permit is kept
            self.rejected += 1
            return False
        res = self.quota.reserve(tenant, tokens)  # clean: in the ticket, settled by complete or expire
        if res is None:
            self.rejected += 1
            return False
        self.tickets[rid] = Ticket(tenant, res)
        return True

    def complete(self, rid: str, used: int) -> None:
        t = self.tickets.pop(rid)
        self.quota.commit(t.res, used)
        self.permits.exit(t.tenant)

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        old = [rid for rid, t in self.tickets.items() if now - t.born > max_age]
        for rid in old:
            t = self.tickets.pop(rid)
            t.cancelled = True
            self.quota.void(t.res)
            self.permits.exit(t.tenant)
        return len(old)

    # ---- whole requests ------------------------------------------------------

    def serve_batch(self, jobs: list[tuple[str, int]], run: Callable[[str], int]) -> int:
        total = 0
        self.gate.lock_shared()  # clean: unlocked after the loop
        for tenant, tokens in jobs:
            res = self.quota.reserve(tenant, tokens)  # leak: no output continues with the tokens reserved
            if res is None:
                continue
            used = run(tenant)
            if used == 0:
                continue
            self.quota.commit(res, used)
            total += used
        self.gate.unlock_shared()
        return total

    def update_weights(self, load: Callable[[], bool], timeout: float) -> bool:
        if not self.gate.lock_exclusive(timeout):  # leak: a load that fails returns with the lock held
            return False
        if not load():
            return False
        self.gate.unlock_exclusive()
        return True

    def update_in_parts(self, parts: list[Callable[[], None]], timeout: float) -> int:
        done = 0
        for part in parts:
            while not self.gate.lock_exclusive(timeout):  # clean: near miss, the loop ends with one lock held
                time.sleep(0.01)
            part()
            done += 1
            self.gate.unlock_exclusive()
        return done

    def reserve_with_retry(self, tenant: str, tokens: int, tries: int) -> Optional[Reservation]:
        for _ in range(tries):
            r = self.quota.reserve(tenant, tokens)  # clean: handed to the caller
            if r is not None:
                return r
            time.sleep(0.01)
            tokens = max(1, tokens // 2)
        return None

    def burst(self, tenant: str, tokens: int, runs: list[Callable[[int], int]]) -> int:
        total = 0
        for run in runs:
            r = self.reserve_with_retry(tenant, tokens, 3)  # leak: a run over its share breaks unsettled
            if r is None:
                break
            used = run(r.tokens)
            if used > r.tokens:
                break
            self.quota.commit(r, used)
            total += used
        return total

    def split(self, tenants: list[str], tokens: int) -> Optional[list[Reservation]]:
        """Reserve for every tenant of a shared batch."""
        got: list[Reservation] = []
        for tenant in tenants:
            r = self.quota.reserve(tenant, tokens)  # clean: near miss, voided for all if one is refused
            if r is None:
                for old in got:
                    self.quota.void(old)
                return None
            got.append(r)
        return got

    def run_split(self, tenants: list[str], tokens: int, run: Callable[[], int]) -> int:
        parts = self.split(tenants, tokens)  # leak: only parts with a share of the use are settled
        if parts is None:
            return 0
        used = run()
        for r in parts:
            share = min(used, r.tokens)
            if share:
                self.quota.commit(r, share)
            used -= share
        return len(parts)
