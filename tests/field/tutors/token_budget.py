"""Per-tenant token budgets, kept in module-level counters."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from queue import Full, Queue
from typing import Callable, Optional

_guard = threading.Lock()
_spendable: dict[str, int] = defaultdict(lambda: 100_000)
_MAX_CONTEXT = 32_768


def earmark(tenant: str, tokens: int) -> bool:
    """Set tokens aside; False when the tenant has too few."""
    with _guard:
        if _spendable[tenant] < tokens:
            return False
        _spendable[tenant] -= tokens
        return True


def refund(tenant: str, tokens: int) -> None:
    with _guard:
        _spendable[tenant] += tokens


def earmark_up_to(tenant: str, tokens: int) -> int:
    """Set aside as much as there is; returns the amount."""
    with _guard:
        granted = min(tokens, _spendable[tenant])
        _spendable[tenant] -= granted
        return granted


@dataclass
class Admission:
    tenant: str
    prompt: int
    max_new: int
    reserved: int = 0


class AdmissionDesk:
    def __init__(self, depth: int) -> None:
        self.queue: Queue[Admission] = Queue(maxsize=depth)
        self.open: dict[int, Admission] = {}

    def enter(self, request_id: int, adm: Admission) -> bool:
        want = adm.prompt + adm.max_new
        if not earmark(adm.tenant, want):  # leak: over-long requests are refused after earmarking
            return False
        if want > _MAX_CONTEXT:
            return False
        adm.reserved = want
        self.open[request_id] = adm
        return True

    def enter_strict(self, request_id: int, adm: Admission) -> bool:
        want = adm.prompt + adm.max_new
        if want > _MAX_CONTEXT or not earmark(adm.tenant, want):  # clean: near miss, length is tested first, leave refunds
            return False
        adm.reserved = want
        self.open[request_id] = adm
        return True

    def leave(self, request_id: int) -> None:
        adm = self.open.pop(request_id)
        refund(adm.tenant, adm.reserved)
        adm.reserved = 0

    def enqueue(self, adm: Admission) -> bool:
        if not earmark(adm.tenant, adm.prompt):  # leak: a full queue is handled without refund
            return False
        adm.reserved = adm.prompt
        try:
            self.queue.put_nowait(adm)
        except Full:
            return False
        return True

    def enqueue_or_refund(self, adm: Admission) -> bool:
        if not earmark(adm.tenant, adm.prompt):  # clean: near miss, Full refunds, otherwise serve_next does
            return False
        adm.reserved = adm.prompt
        try:
            self.queue.put_nowait(adm)
        except Full:
            refund(adm.tenant, adm.reserved)
            return False
        return True

    def serve_next(self, run: Callable[[Admission], None]) -> None:
        adm = self.queue.get()
        try:
            run(adm)
        finally:
            refund(adm.tenant, adm.reserved)

    def top_up(self, request_id: int, more: int) -> bool:
        adm = self.open[request_id]
        if not earmark(adm.tenant, more):  # clean: near miss, added to reserved, which leave refunds
            return False
        adm.reserved += more
        return True

    def resize(self, request_id: int, max_new: int) -> bool:
        adm = self.open[request_id]
        want = adm.prompt + max_new
        if not earmark(adm.tenant, want):  # leak: reserved is overwritten, the old amount is forgotten
            return False
        adm.reserved = want
        return True


def transfer_quota(donor: str, sharer: str, tokens: int) -> bool:
    """Earmark on two tenants at once; settle_pair refunds both."""
    if not earmark(donor, tokens):  # leak: not refunded when the sharer has too few
        return False
    if not earmark(sharer, tokens):  # clean: the caller holds it until settle_pair
        return False
    return True


def settle_pair(donor: str, sharer: str, tokens: int) -> None:
    refund(donor, tokens)
    refund(sharer, tokens)


def run_clipped(tenant: str, tokens: int, run: Callable[[int], int]) -> Optional[int]:
    granted = earmark_up_to(tenant, tokens)  # clean: near miss, early return only for a grant of zero
    if granted == 0:
        return None
    try:
        return run(granted)
    finally:
        refund(tenant, granted)


def run_partial(tenant: str, tokens: int, floor: int, run: Callable[[int], int]) -> Optional[int]:
    granted = earmark_up_to(tenant, tokens)  # leak: a grant below the floor is kept on return
    if granted < floor:
        return None
    try:
        return run(granted)
    finally:
        refund(tenant, granted)


def run_metered(tenant: str, tokens: int, run: Callable[[], None]) -> bool:
    if not earmark(tenant, tokens):  # clean: near miss, finally refunds, also after a handled timeout
        return False
    try:
        run()
    except TimeoutError:
        return False
    finally:
        refund(tenant, tokens)
    return True
