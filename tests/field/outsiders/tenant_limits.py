"""Admission control: per tenant concurrency, token credits and a global gate."""
from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

logger = logging.getLogger("admission")


class Rejected(Exception):
    def __init__(self, tenant: str, reason: str) -> None:
        super().__init__(f"{tenant}: {reason}")
        self.reason = reason


class CreditPool:
    """Token credits: grant() takes some, refund() gives them back."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._mu = threading.Lock()

    def grant(self, n: int) -> bool:
        with self._mu:
            if self._left < n:
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._mu:
            self._left += n


@dataclass
class Ticket:
    tenant: str
    credits: int
    opened: float = field(default_factory=time.monotonic)


class Admission:
    def __init__(self, credits: int, parallel: int, per_tenant: int) -> None:
        self.credits = CreditPool(credits)
        self.gate = threading.BoundedSemaphore(parallel)
        self.per_tenant = per_tenant
        self.active: Dict[str, List[Ticket]] = defaultdict(list)
        self.stats_lock = threading.Lock()
        self.served: Dict[str, int] = defaultdict(int)

    def enter(self, tenant: str, n: int) -> Ticket:
        if len(self.active[tenant]) >= self.per_tenant:
            raise Rejected(tenant, "concurrency")
        if not self.credits.grant(n):  # clean: near miss, the failed gate below refunds, otherwise leave() does
            raise Rejected(tenant, "credits")
        if not self.gate.acquire(timeout=1.0):  # clean: leave() releases the gate
            self.credits.refund(n)
            raise Rejected(tenant, "busy")
        t = Ticket(tenant, n)
        self.active[tenant].append(t)
        return t

    def leave(self, t: Ticket) -> None:
        self.active[t.tenant].remove(t)
        self.credits.refund(t.credits)
        self.gate.release()

    def enter_fast(self, tenant: str, n: int) -> Optional[Ticket]:
        if not self.gate.acquire(blocking=False):  # leak: without credits it returns None with the gate taken
            return None
        if not self.credits.grant(n):  # clean: kept in the ticket, leave() refunds
            return None
        t = Ticket(tenant, n)
        self.active[tenant].append(t)
        return t

    def run(self, tenant: str, n: int, fn: Callable[[], str]) -> str:
        t = self.enter(tenant, n)  # clean: finally
        try:
            return fn()
        finally:
            self.leave(t)

    def run_or_default(self, tenant: str, n: int, fn: Callable[[], str], default: str) -> str:
        try:
            t = self.enter(tenant, n)  # clean: near miss, a rejection holds nothing and the rest ends in leave()
        except Rejected as e:
            logger.info("rejected: %s", e.reason)
            return default
        result = fn() or default
        self.leave(t)
        return result

    def run_metered(self, tenant: str, n: int, fn: Callable[[], str]) -> Optional[str]:
        t = self.enter(tenant, n)  # leak: an empty result is returned as None before leave()
        text = fn()
        if not text:
            logger.warning("empty result for %s", tenant)
            return None
        self.leave(t)
        self.count(tenant)
        return text

    def count(self, tenant: str) -> None:
        self.stats_lock.acquire()  # clean: released on the next line but one
        self.served[tenant] += 1
        self.stats_lock.release()

    def top(self, n: int) -> List[str]:
        self.stats_lock.acquire()  # leak: nothing served yet means a return with the lock
        if not self.served:
            return []
        names = sorted(self.served, key=lambda k: -self.served[k])[:n]
        self.stats_lock.release()
        return names

    def burst(self, tenant: str, sizes: List[int]) -> int:
        """Runs as many of the sizes as there are credits for."""
        granted: List[int] = []
        for n in sizes:
            if not self.credits.grant(n):  # clean: near miss, the sum of what was granted is refunded
                break
            granted.append(n)
        done = len(granted)
        self.credits.refund(sum(granted))
        return done

    def transfer(self, src: str, dst: str, n: int) -> bool:
        if not self.credits.grant(n):  # leak: the same tenant on both sides returns with the credits granted
            return False
        if src == dst:
            return True
        self.served[src] -= 1
        self.served[dst] += 1
        self.credits.refund(n)
        return True

    def expire(self, max_age: float) -> int:
        now = time.monotonic()
        old = [t for ts in self.active.values() for t in ts if now - t.opened > max_age]
        for t in old:
            self.leave(t)
        return len(old)
