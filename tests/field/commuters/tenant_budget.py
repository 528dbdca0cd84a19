"""Per-tenant token budgets: reserve before prefill, settle after decode."""
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Optional


@dataclass
class Reservation:
    tenant: str
    amount: int
    settled: bool = False


@dataclass
class ChatRequest:
    request_id: str
    tenant: str
    prompt_tokens: int
    max_new_tokens: int
    n: int = 1
    reservation: Optional[Reservation] = None


class QuotaExceeded(Exception):
    pass


class TenantBudget:
    def __init__(self, limits: dict[str, int]) -> None:
        self._left: dict[str, int] = defaultdict(int, limits)

    def reserve(self, tenant: str, amount: int) -> Optional[Reservation]:
        if self._left[tenant] < amount:
            return None
        self._left[tenant] -= amount  # clean: the reservation carries the amount to the caller
        return Reservation(tenant, amount)

    def reserve_up_to(self, tenant: str, amount: int) -> Reservation:
        granted = min(amount, self._left[tenant])
        self._left[tenant] -= granted  # clean: handed out as a reservation
        return Reservation(tenant, granted)

    def refund(self, res: Reservation) -> None:
        if res.settled:
            return
        res.settled = True
        self._left[res.tenant] += res.amount

    def settle(self, res: Reservation, used: int) -> None:
        if res.settled:
            return
        res.settled = True
        self._left[res.tenant] += max(res.amount - used, 0)


class Admission:
    def __init__(self, budget: TenantBudget, context_limit: int) -> None:
        self.budget = budget
        self.context_limit = context_limit
        self.inflight: dict[str, ChatRequest] = {}
        self.parked: list[ChatRequest] = []

    def admit(self, req: ChatRequest) -> bool:
        res = self.budget.reserve(req.tenant, req.prompt_tokens + req.max_new_tokens)  # leak: too long a context returns without refund
        if res is None:
            self.parked.append(req)
            return False
        if req.prompt_tokens + req.max_new_tokens > self.context_limit:
            return False
        req.reservation = res
        self.inflight[req.request_id] = req
        return True

    def admit_batch(self, reqs: list[ChatRequest]) -> list[ChatRequest]:
        accepted = []
        for req in reqs:
            res = self.budget.reserve(req.tenant, req.max_new_tokens)  # clean: near miss, a duplicate is refunded before the continue
            if res is None:
                continue
            if req.request_id in self.inflight:
                self.budget.refund(res)
                continue
            req.reservation = res
            self.inflight[req.request_id] = req
            accepted.append(req)
        return accepted

    def extend(self, request_id: str, more: int) -> bool:
        req = self.inflight[request_id]
        res = self.budget.reserve(req.tenant, more)  # leak: overwrites the reservation the request already held
        if res is None:
            return False
        req.reservation = res
        req.max_new_tokens += more
        return True

    def finish(self, request_id: str, used: int) -> None:
        req = self.inflight.pop(request_id, None)
        if req is None or req.reservation is None:
            return
        self.budget.settle(req.reservation, used)
        req.reservation = None

    def cancel(self, request_id: str) -> None:
        req = self.inflight.pop(request_id, None)
        if req is not None and req.reservation is not None:
            self.budget.refund(req.reservation)

    def admit_pair(self, first: ChatRequest, second: ChatRequest) -> bool:
        if first.request_id in self.inflight or second.request_id in self.inflight:
            return False
        left = self.budget.reserve(first.tenant, first.max_new_tokens)  # leak: not refunded when the second reservation fails
        if left is None:
            return False
        right = self.budget.reserve(second.tenant, second.max_new_tokens)  # clean: None is the only way past, else stored
        if right is None:
            return False
        first.reservation, second.reservation = left, right
        self.inflight[first.request_id] = first
        self.inflight[second.request_id] = second
        return True


def estimate_cost(budget: TenantBudget, req: ChatRequest) -> float:
    res = budget.reserve_up_to(req.tenant, req.max_new_tokens)  # clean: refunded before the share is computed
    granted = res.amount
    budget.refund(res)
    if granted == 0:
        return math.inf
    return req.max_new_tokens / granted


def run_best_of(budget: TenantBudget, req: ChatRequest, decode) -> list[str]:
    outputs: list[str] = []
    for _ in range(req.n):
        res = budget.reserve(req.tenant, req.max_new_tokens)  # leak: breaking on an empty decode skips the settle
        if res is None:
            break
        text = decode(req)
        if not text:
            break
        outputs.append(text)
        budget.settle(res, len(text))
    return outputs


def run_embedding(budget: TenantBudget, req: ChatRequest, embed) -> list[float]:
    res = budget.reserve(req.tenant, req.prompt_tokens)  # clean: near miss, raising happens only without a reservation
    if res is None:
        raise QuotaExceeded(req.tenant)
    try:
        return embed(req)
    except ValueError:
        budget.refund(res)
        return []
    finally:
        budget.settle(res, req.prompt_tokens)


def clamp(admission: Admission, req: ChatRequest) -> int:
    if req.request_id in admission.inflight:
        return 0
    res = admission.budget.reserve_up_to(req.tenant, req.max_new_tokens)  # clean: near miss, both arms dispose of it
    if res.amount < 16:
        admission.budget.refund(res)
        return 0
    req.max_new_tokens = res.amount
    req.reservation = res
    admission.inflight[req.request_id] = req
    return res.amount
