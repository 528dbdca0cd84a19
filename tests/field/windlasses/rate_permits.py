"""Concurrency permits and token budgets in front of model endpoints."""
from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional


class Verdict(enum.Enum):
    SENT = 1
    THROTTLED = 2
    REJECTED = 3


class PermitGate:
    """Counting gate: enter() -> bool, leave()."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._out = 0
        self._cv = threading.Condition()

    def enter(self, timeout: Optional[float] = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._out < self._width, timeout):
                return False
            self._out += 1
            return True

    def leave(self) -> None:
        with self._cv:
            self._out -= 1
            self._cv.notify()

    def __enter__(self) -> "PermitGate":
        self.enter()  # clean: __exit__ leaves
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()


class TokenBudget:
    """Tokens reserved for a request; settle() refunds what was not used."""

    def __init__(self, capacity: int) -> None:
        self._left = capacity
        self._mu = threading.Lock()

    def reserve(self, n: int) -> bool:
        with self._mu:
            if self._left < n:
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._mu:
            self._left += n


class TenantGate:
    """A wrapper: global gate first, then the tenant's own."""

    def __init__(self, total: PermitGate, per_tenant: int) -> None:
        self.total = total
        self.per_tenant = per_tenant
        self._gates: Dict[str, PermitGate] = {}

    def _gate(self, tenant: str) -> PermitGate:
        return self._gates.setdefault(tenant, PermitGate(self.per_tenant))

    def admit(self, tenant: str, timeout: float) -> bool:
        if not self.total.enter(timeout):  # clean: left when the tenant's gate refuses, else left by dismiss()
            return False
        if not self._gate(tenant).enter(timeout):  # clean: held by the admitted caller, dismiss() leaves it
            self.total.leave()
            return False
        return True

    def admit_now(self, tenant: str) -> bool:
        return (self.total.enter(0)  # leak: kept when the tenant's gate refuses
                and self._gate(tenant).enter(0))  # clean: the result tells the caller to dismiss()

    def dismiss(self, tenant: str) -> None:
        self._gate(tenant).leave()
        self.total.leave()


@dataclass
class Request:
    tenant: str
    prompt: str
    max_tokens: int
    reserved: int = 0
    admitted: bool = False


class Endpoint:
    def __init__(self, gate: TenantGate, budget: TokenBudget, call: Callable[[str, int], Optional[int]]) -> None:
        self.gate = gate
        self.budget = budget
        self.call = call
        self.inflight: List[Request] = []

    def submit(self, req: Request) -> Verdict:
        if not self.gate.admit(req.tenant, 1.0):  # leak: the REJECTED return skips dismiss
            return Verdict.THROTTLED
        if not self.budget.reserve(req.max_tokens):  # clean: used up or refunded after the call
            return Verdict.REJECTED
        used = self.call(req.prompt, req.max_tokens)
        if used is None:
            used = 0
        self.budget.refund(req.max_tokens - used)
        self.gate.dismiss(req.tenant)
        return Verdict.SENT

    def submit_checked(self, req: Request) -> Verdict:
        if not self.budget.reserve(req.max_tokens):  # clean: refunded on the throttled return and after the call
            return Verdict.REJECTED
        if not self.gate.admit(req.tenant, 1.0):  # clean: dismissed by finally
            self.budget.refund(req.max_tokens)
            return Verdict.THROTTLED
        used = 0
        try:
            used = self.call(req.prompt, req.max_tokens) or 0
        finally:
            self.budget.refund(req.max_tokens - used)
            self.gate.dismiss(req.tenant)
        return Verdict.SENT

    # -- two-phase use: open() ... close() -----------------------------------

    def open(self, req: Request) -> bool:
        req.admitted = self.gate.admit(req.tenant, 0.5)  # clean: near miss, req.admitted makes close() dismiss
        if not req.admitted:
            return False
        if self.budget.reserve(req.max_tokens):  # clean: near miss, req.reserved makes close() refund
            req.reserved = req.max_tokens
        self.inflight.append(req)
        return True

    def close(self, req: Request) -> None:
        if req in self.inflight:
            self.inflight.remove(req)
        if req.reserved:
            self.budget.refund(req.reserved)
            req.reserved = 0
        if req.admitted:
            self.gate.dismiss(req.tenant)
            req.admitted = False

    def close_all(self) -> None:
        for req in list(self.inflight):
            self.close(req)

    def grow(self, req: Request, extra: int) -> bool:
        """Ask for a longer completion on an open request."""
        if not self.budget.reserve(extra):  # leak: req.reserved is not raised, so close() refunds too little
            return False
        req.max_tokens += extra
        return True


class BurstSender:
    def __init__(self, gate: PermitGate, send: Callable[[bytes], bool]) -> None:
        self.gate = gate
        self.send = send
        self.failures = 0

    def send_all(self, payloads: List[bytes]) -> int:
        sent = 0
        for body in payloads:
            self.gate.enter()  # leak: a failed send continues without leave
            if not self.send(body):
                self.failures += 1
                continue
            self.gate.leave()
            sent += 1
        return sent

    def send_retry(self, body: bytes, tries: int) -> bool:
        for n in range(tries):
            if not self.gate.enter(0.2):  # clean: left right after the send, before the verdict
                continue
            ok = self.send(body)
            self.gate.leave()
            if ok:
                return True
            time.sleep(0.01 * 2 ** n)
        return False

    def send_async(self, body: bytes, spawn: Callable[[Callable[[], None]], bool]) -> bool:
        """The permit is left by the spawned task when it is done."""
        if not self.gate.enter(0.2):  # leak: a spawner that refuses the task leaves nobody to leave()
            return False

        def task() -> None:
            try:
                self.send(body)
            finally:
                self.gate.leave()

        if not spawn(task):
            self.failures += 1
            return False
        return True

    def send_async_checked(self, body: bytes, spawn: Callable[[Callable[[], None]], bool]) -> bool:
        if not self.gate.enter(0.2):  # clean: near miss, the task leaves, or this method when it was refused
            return False

        def task() -> None:
            try:
                self.send(body)
            finally:
                self.gate.leave()

        if spawn(task):
            return True
        self.gate.leave()
        return False

    def probe(self) -> bool:
        with self.gate:
            return self.send(b"")


class QuotaSession:
    """`with QuotaSession(...)`: reserves tokens, refunds the rest on exit."""

    def __init__(self, budget: TokenBudget, n: int) -> None:
        self.budget = budget
        self.n = n
        self.used = 0
        self.ok = False

    def __enter__(self) -> "QuotaSession":
        self.ok = self.budget.reserve(self.n)  # leak: __exit__ returns early on an exception, without refund
        return self

    def spend(self, n: int) -> None:
        self.used += n

    def __exit__(self, et: object, ev: object, tb: object) -> None:
        if not self.ok or et is not None:
            return
        self.budget.refund(self.n - self.used)
