"""HTTP gateway: token budgets per tenant, upstream leases, hedging."""
from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger("gateway")


@dataclass
class Ticket:
    tenant: str
    tokens: int


class TokenBudget:
    def __init__(self, limits: Dict[str, int]) -> None:
        self._left = dict(limits)
        self._mu = threading.Lock()

    def charge(self, tenant: str, tokens: int) -> Optional[Ticket]:
        with self._mu:
            if self._left.get(tenant, 0) < tokens:
                return None
            self._left[tenant] -= tokens
            return Ticket(tenant, tokens)

    def settle(self, ticket: Ticket, used: int = 0) -> None:
        """The tokens in flight are over; only what was used stays charged."""
        with self._mu:
            self._left[ticket.tenant] += max(0, ticket.tokens - used)


@dataclass(eq=False)
class Upstream:
    url: str
    inflight: int = 0
    healthy: bool = True

    def call(self, body: Dict[str, Any], timeout: float) -> Tuple[int, str]:
        time.sleep(0)
        return (200, str(body)) if self.healthy else (503, "")


class UpstreamSet:
    def __init__(self, urls: List[str], cap: int) -> None:
        self._all = [Upstream(u) for u in urls]
        self._cap = cap
        self._mu = threading.Lock()

    def acquire(self, avoid: Optional[Upstream] = None) -> Optional[Upstream]:
        with self._mu:
            ok = [u for u in self._all if u is not avoid and u.inflight < self._cap]
            if not ok:
                return None
            best = min(ok, key=lambda u: u.inflight)
            best.inflight += 1
            return best

    def release(self, up: Upstream) -> None:
        with self._mu:
            up.inflight -= 1


Response = Tuple[int, str]


class Gateway:
    def __init__(self, budget: TokenBudget, ups: UpstreamSet) -> None:
        self.budget = budget
        self.ups = ups
        self.retries = 0

    def handle(self, tenant: str, body: Dict[str, Any]) -> Response:
        ticket = self.budget.charge(tenant, int(body.get("max_tokens", 16)))  # clean: settled in finally
        if ticket is None:
            return 429, "budget"
        used = 0
        try:
            up = self.ups.acquire()  # clean: None leaves at once, otherwise released after the call
            if up is None:
                return 503, "busy"
            status, text = up.call(body, 30.0)
            self.ups.release(up)
            used = len(text.split())
            return status, text
        finally:
            self.budget.settle(ticket, used)

    def handle_batch(self, tenant: str, bodies: List[Dict[str, Any]]) -> Response:
        tickets: List[Ticket] = []
        for body in bodies:
            t = self.budget.charge(tenant, int(body["max_tokens"]))  # leak: a refusal drops the earlier
            if t is None:
                return 429, "budget"
            tickets.append(t)
        out = [self._dispatch(body) for body in bodies]
        for t, text in zip(tickets, out):
            self.budget.settle(t, len(text.split()))
        return 200, "\n".join(out)

    def handle_group(self, tenant: str, bodies: List[Dict[str, Any]]) -> Response:
        tickets: List[Ticket] = []
        for body in bodies:
            t = self.budget.charge(tenant, int(body["max_tokens"]))  # clean: near miss, refusal undoes
            if t is None:
                for earlier in tickets:
                    self.budget.settle(earlier)
                return 429, "budget"
            tickets.append(t)
        texts = []
        while tickets:
            t = tickets.pop()
            texts.append(self._dispatch({"max_tokens": t.tokens}))
            self.budget.settle(t, len(texts[-1]))
        return 200, "\n".join(texts)

    def _dispatch(self, body: Dict[str, Any]) -> str:
        up = self.ups.acquire()  # clean: near miss, released under the same test
        text = ""
        if up is not None:
            _, text = up.call(body, 10.0)
        if up is not None:
            self.ups.release(up)
        return text

    def call_with_retry(self, body: Dict[str, Any], tries: int = 3) -> Response:
        status, text = 503, ""
        up = None
        for n in range(tries):
            up = self.ups.acquire(avoid=up)  # leak: the next try overwrites the upstream that failed
            if up is None:
                break
            status, text = up.call(body, 10.0)
            if status == 200:
                break
            self.retries += 1
            time.sleep(0.05 * n)
        if up is not None:
            self.ups.release(up)
        return status, text

    def hedged(self, body: Dict[str, Any]) -> Response:
        first = self.ups.acquire()  # clean: released on all ways out
        if first is None:
            return 503, "busy"
        status, text = first.call(body, 0.2)
        if status == 200:
            self.ups.release(first)
            return status, text
        second = self.ups.acquire(avoid=first)  # leak: the second is never released, whichever one answers
        if second is None:
            self.ups.release(first)
            return status, text
        status, text = second.call(body, 10.0)
        self.ups.release(first)
        return status, text

    def stream_prefix(self, tenant: str, body: Dict[str, Any], limit: int) -> Iterator[str]:
        ticket = self.budget.charge(tenant, limit)  # leak: a reply longer than the limit returns unsettled
        if ticket is None:
            return
        sent = 0
        for word in self._dispatch(body).split():
            if sent >= limit:
                yield "data: [TRUNCATED]"
                return
            sent += 1
            yield f"data: {word}"
        self.budget.settle(ticket, sent)


class Stage:
    """Template of one request stage: setup, work, teardown."""

    def __init__(self, gw: Gateway, tenant: str) -> None:
        self.gw = gw
        self.tenant = tenant

    def setup(self, body: Dict[str, Any]) -> bool:
        return True

    def teardown(self) -> None:
        logger.debug("stage of %s over", self.tenant)

    def run(self, body: Dict[str, Any]) -> Optional[str]:
        if not self.setup(body):
            return None
        try:
            return self.gw._dispatch(body)
        finally:
            self.teardown()


class MeteredStage(Stage):
    ticket: Optional[Ticket] = None

    def setup(self, body: Dict[str, Any]) -> bool:
        self.ticket = self.gw.budget.charge(self.tenant, 64)  # clean: near miss, settled by teardown
        return self.ticket is not None

    def teardown(self) -> None:
        if self.ticket is not None:
            self.gw.budget.settle(self.ticket, 64)
            self.ticket = None
        super().teardown()


class PinnedStage(Stage):
    """All the calls of a stage go to one upstream."""

    up: Optional[Upstream] = None

    def setup(self, body: Dict[str, Any]) -> bool:
        self.up = self.gw.ups.acquire()  # leak: teardown forgets the upstream without releasing it
        return self.up is not None

    def teardown(self) -> None:
        self.up = None
        super().teardown()


class Session:
    """A websocket session."""

    def __init__(self, gw: Gateway, tenant: str, metered: bool) -> None:
        self.gw = gw
        self.tenant = tenant
        self.metered = metered
        self.started = False
        self.ticket: Optional[Ticket] = None
        self.grace: Optional[Ticket] = None

    def open(self) -> None:
        if self.metered:
            self.ticket = self.gw.budget.charge(self.tenant, 1000)  # leak: close before start settles nothing
            self.grace = self.gw.budget.charge(self.tenant, 10)  # clean: near miss, same guard in close

    def start(self) -> None:
        self.started = True

    def close(self, used: int) -> None:
        if self.metered and self.grace is not None:
            self.gw.budget.settle(self.grace)
            self.grace = None
        if self.started and self.ticket is not None:
            self.gw.budget.settle(self.ticket, used)
        self.ticket = None
