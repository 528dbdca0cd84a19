"""Thread-pooled batch inference client: quota tickets travel with futures and callbacks."""
from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List, Optional

logger = logging.getLogger(__name__)


@dataclass
class Ticket:
    number: int
    weight: int
    tags: Dict[str, str] = field(default_factory=dict)


class Quota:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._serial = 0
        self._cond = threading.Condition()

    def draw(self, weight: int = 1) -> Ticket:
        with self._cond:
            self._cond.wait_for(lambda: self.used + weight <= self.capacity)
            return self._issue(weight)

    def draw_now(self, weight: int = 1) -> Optional[Ticket]:
        with self._cond:
            if self.used + weight > self.capacity:
                return None
            return self._issue(weight)

    def _issue(self, weight: int) -> Ticket:
        self._serial += 1
        self.used += weight
        return Ticket(self._serial, weight)

    def redeem(self, ticket: Ticket) -> None:
        with self._cond:
            self.used -= ticket.weight
            self._cond.notify_all()


@dataclass
class Job:
    payload: Any
    ticket: Optional[Ticket] = None
    owns_ticket: bool = True


class BatchClient:
    def __init__(self, quota: Quota, call: Callable[[Any], Any], workers: int = 4) -> None:
        self.quota = quota
        self.call = call
        self.pool = ThreadPoolExecutor(workers)
        self.pending: "queue.Queue[Job]" = queue.Queue()
        self.retry: List[Job] = []
        self.results: Dict[int, Any] = {}
        self.reserve_ticket: Optional[Ticket] = None

    def _on_done(self, ticket: Ticket, fut: "Future[Any]") -> None:
        if fut.cancelled():
            return
        if fut.exception() is None:
            self.results[ticket.number] = fut.result()
        self.quota.redeem(ticket)

    def _settle(self, ticket: Ticket, fut: "Future[Any]") -> None:
        self.quota.redeem(ticket)
        if not fut.cancelled() and fut.exception() is None:
            self.results[ticket.number] = fut.result()

    def submit(self, payload: Any) -> "Future[Any]":
        ticket = self.quota.draw()  # leak: the callback returns early for a cancelled future and keeps the ticket drawn
        fut = self.pool.submit(self.call, payload)
        fut.add_done_callback(partial(self._on_done, ticket))
        return fut

    def submit_weighted(self, payload: Any, weight: int) -> "Future[Any] | None":
        ticket = self.quota.draw_now(weight)  # clean: near miss, the callback redeems it for cancelled futures too
        if ticket is None:
            return None
        fut = self.pool.submit(self.call, payload)
        fut.add_done_callback(partial(self._settle, ticket))
        return fut

    def enqueue(self, payload: Any, shared: Optional[Ticket] = None) -> None:
        if shared is not None:
            self.pending.put(Job(payload, shared, owns_ticket=False))
            return
        ticket = self.quota.draw()  # clean: near miss, queued with owns_ticket set, so the drain redeems it
        self.pending.put(Job(payload, ticket))

    def enqueue_light(self, payload: Any) -> bool:
        ticket = self.quota.draw_now()  # leak: queued with owns_ticket False, so the drain never redeems it
        if ticket is None:
            return False
        self.pending.put(Job(payload, ticket, owns_ticket=False))
        return True

    def drain(self) -> int:
        handled = 0
        while True:
            try:
                job = self.pending.get_nowait()
            except queue.Empty:
                return handled
            try:
                self.call(job.payload)
                handled += 1
            except ValueError as exc:
                logger.warning("dropping job: %s", exc)
            if job.owns_ticket and job.ticket is not None:
                self.quota.redeem(job.ticket)

    def enqueue_group(self, payloads: List[Any]) -> None:
        group = self.quota.draw(len(payloads))  # clean: near miss, jobs borrow it and it is redeemed after the drain
        for payload in payloads:
            self.enqueue(payload, shared=group)
        self.drain()
        self.quota.redeem(group)

    def defer(self, payload: Any) -> None:
        ticket = self.quota.draw()  # leak: run_deferred clears the retry list and redeems only jobs that succeed
        self.retry.append(Job(payload, ticket))

    def run_deferred(self) -> int:
        ok = 0
        for job in self.retry:
            try:
                self.call(job.payload)
            except ValueError:
                continue
            ok += 1
            if job.ticket is not None:
                self.quota.redeem(job.ticket)
        self.retry.clear()
        return ok

    def call_with_retry(self, payload: Any, tries: int = 3) -> Any:
        for _ in range(tries):
            ticket = self.quota.draw()  # leak: a ConnectionError goes round again with a new ticket over the old one
            try:
                value = self.call(payload)
            except ConnectionError:
                continue
            self.quota.redeem(ticket)
            return value
        return None

    def call_held(self, payload: Any, tries: int = 3) -> Any:
        ticket = self.quota.draw()  # clean: near miss, one ticket for all tries, redeemed behind the loop and before the return
        value: Any = None
        for _ in range(tries):
            try:
                value = self.call(payload)
                break
            except ConnectionError:
                continue
        self.quota.redeem(ticket)
        return value

    def hold_reserve(self) -> bool:
        if self.reserve_ticket is None:
            self.reserve_ticket = self.quota.draw_now()  # clean: near miss, drawn once at a time, shutdown redeems it
        return self.reserve_ticket is not None

    def urgent(self, payload: Any) -> Any:
        ticket = self.quota.draw_now()  # clean: near miss, or-ed with the reserve, which is moved out and redeemed alike
        if ticket is None:
            ticket, self.reserve_ticket = self.reserve_ticket, None
        if ticket is None:
            return None
        try:
            return self.call(payload)
        finally:
            self.quota.redeem(ticket)

    def split_call(self, payload: List[Any], weight: int) -> Optional[List[Any]]:
        big = self.quota.draw_now(weight)  # leak: lost when no second ticket can be had
        small = self.quota.draw_now(1)  # clean: near miss, redeemed with the big one or alone
        if small is None:
            return None
        out = [self.call(p) for p in payload]
        if big is not None:
            self.quota.redeem(big)
        self.quota.redeem(small)
        return out

    def shutdown(self) -> None:
        self.drain()
        self.pool.shutdown(wait=True)
        if self.reserve_ticket is not None:
            self.quota.redeem(self.reserve_ticket)
            self.reserve_ticket = None
