"""Routing of requests to replicas: in-flight tickets and per-tenant token quotas."""
from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple


class Outcome(enum.Enum):
    OK = "ok"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"


class Ticket(NamedTuple):
    replica: "Replica"
    weight: int


@dataclass(eq=False)
class Replica:
    name: str
    inflight: int = 0
    weight: int = 0
    draining: bool = False

    def begin(self, weight: int) -> Ticket:
        self.inflight += 1
        self.weight += weight
        return Ticket(self, weight)

    def end(self, ticket: Ticket) -> None:
        self.inflight -= 1
        self.weight -= ticket.weight


class Quota:
    """Tokens a tenant may have outstanding at one time; all of them go back when its request is over."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._out: dict[str, int] = {}

    def debit(self, tenant: str, tokens: int) -> bool:
        now = self._out.get(tenant, 0)
        if now + tokens > self.limit:
            return False
        self._out[tenant] = now + tokens
        return True

    def credit(self, tenant: str, tokens: int) -> None:
        self._out[tenant] -= tokens


@dataclass
class Call:
    tenant: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)


Send = Callable[[Replica, Call], Outcome]


class Router:
    def __init__(self, replicas: list[Replica], quota: Quota, send: Send) -> None:
        self.replicas = replicas
        self.quota = quota
        self.send = send
        self.shed = 0
        self.late = 0

    def _pick(self) -> Replica:
        live = [r for r in self.replicas if not r.draining]
        return min(live, key=lambda r: (r.weight, r.inflight))

    def _open(self, call: Call) -> Ticket:
        replica = self._pick()
        return replica.begin(len(call.prompt))  # clean: handed to the caller

    def route(self, call: Call) -> list[int] | None:
        ticket = self._open(call)  # leak: the overloaded case returns without end
        match self.send(ticket.replica, call):
            case Outcome.OK:
                ticket.replica.end(ticket)
                return call.output
            case Outcome.TIMEOUT:
                self.late += 1
                ticket.replica.end(ticket)
                return None
            case Outcome.OVERLOADED:
                self.shed += 1
                return None

    def route_once(self, call: Call) -> list[int] | None:
        ticket = self._open(call)  # clean: near miss, ended before the match
        outcome = self.send(ticket.replica, call)
        ticket.replica.end(ticket)
        match outcome:
            case Outcome.OK:
                return call.output
            case Outcome.TIMEOUT:
                self.late += 1
            case Outcome.OVERLOADED:
                self.shed += 1
        return None

    def route_retrying(self, call: Call, tries: int = 3) -> list[int] | None:
        for attempt in range(tries):
            replica = self._pick()
            ticket = replica.begin(len(call.prompt))  # leak: attempts that fail are never ended
            if self.send(replica, call) is Outcome.OK:
                replica.end(ticket)
                return call.output
            time.sleep(0.01 * 2 ** attempt)
        return None

    def route_hedged(self, call: Call) -> list[int] | None:
        """Two replicas get the call; the first good answer counts."""
        first, second = sorted(self.replicas, key=lambda r: r.weight)[:2]
        tickets = [r.begin(1) for r in (first, second)]  # leak: the loop returns at the winner, the loser stays open
        for ticket in tickets:
            outcome = self.send(ticket.replica, call)
            ticket.replica.end(ticket)
            if outcome is Outcome.OK:
                return call.output
        return None

    def route_mirrored(self, call: Call) -> list[int] | None:
        first, second = sorted(self.replicas, key=lambda r: r.weight)[:2]
        tickets = [r.begin(1) for r in (first, second)]  # clean: near miss, the answer is kept, the loop runs on
        answer = None
        for ticket in tickets:
            outcome = self.send(ticket.replica, call)
            ticket.replica.end(ticket)
            if outcome is Outcome.OK and answer is None:
                answer = call.output
        return answer

    def complete(self, call: Call) -> bool:
        need = len(call.prompt) + call.max_tokens
        if not self.quota.debit(call.tenant, need):  # leak: the prompt's tokens are never credited
            return False
        ok = self.route_once(call) is not None
        self.quota.credit(call.tenant, call.max_tokens)
        return ok

    def complete_counted(self, call: Call) -> bool:
        need = len(call.prompt) + call.max_tokens
        if not self.quota.debit(call.tenant, need):  # clean: near miss, prompt and output are credited apart
            return False
        ok = self.route_once(call) is not None
        self.quota.credit(call.tenant, len(call.prompt))
        self.quota.credit(call.tenant, call.max_tokens)
        return ok

    def complete_batch(self, calls: list[Call]) -> int:
        admitted = []
        for call in calls:
            if not self.quota.debit(call.tenant, call.max_tokens):  # leak: calls that got no answer are not credited
                continue
            admitted.append(call)
        answered = [c for c in admitted if self.route_once(c) is not None]
        for call in answered:
            self.quota.credit(call.tenant, call.max_tokens)
        return len(answered)

    def complete_group(self, calls: list[Call]) -> int:
        admitted = []
        for call in calls:
            if not self.quota.debit(call.tenant, call.max_tokens):  # clean: near miss, all admitted are credited
                continue
            admitted.append(call)
        answered = 0
        for call in admitted:
            answered += self.route_once(call) is not None
            self.quota.credit(call.tenant, call.max_tokens)
        return answered

    def drain(self, replica: Replica) -> bool:
        probe = replica.begin(0)  # clean: near miss, ended in the finally whatever is returned
        try:
            if replica.inflight > 1:
                return False
            replica.draining = True
            return True
        finally:
            replica.end(probe)
