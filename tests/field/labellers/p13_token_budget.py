"""Token budgets and request rows of a router, reserved before dispatch."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional


class TokenBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def reserve(self, n: int) -> bool:
        if self.used + n > self.total:
            return False
        self.used += n
        return True

    def unreserve(self, n: int) -> None:
        self.used -= n


class TicketPool:
    def __init__(self, count: int) -> None:
        self.tickets: Deque[int] = deque(range(count))

    def take(self) -> Optional[int]:
        try:
            return self.tickets.popleft()  # clean: pool body, returned to the caller
        except IndexError:
            return None

    def take_in_range(self, lo: int, hi: int) -> Optional[int]:
        for _ in range(len(self.tickets)):
            t = self.tickets.popleft()  # clean: near miss, a ticket out of range goes to the back of the queue
            if lo <= t < hi:
                return t
            self.tickets.append(t)
        return None

    def put_back(self, ticket: int) -> None:
        self.tickets.append(ticket)


@dataclass
class Ticketed:
    rid: str
    tokens: int
    ticket: Optional[int] = None
    counted: bool = False
    charged: int = 0


class Router:
    def __init__(self, budget: TokenBudget, tickets: TicketPool,
                 send: Callable[[Ticketed], Optional[str]]) -> None:
        self.budget = budget
        self.tickets = tickets
        self.send = send
        self.live: Dict[str, Ticketed] = {}

    def dispatch(self, req: Ticketed) -> Optional[str]:
        if not self.budget.reserve(req.tokens):  # leak: no ticket left, returns without giving the tokens back
            return None
        ticket = self.tickets.take()  # clean: put back after the send
        if ticket is None:
            return None
        req.ticket = ticket
        answer = self.send(req)
        self.tickets.put_back(ticket)
        self.budget.unreserve(req.tokens)
        return answer

    def dispatch_clipped(self, req: Ticketed, left: int) -> Optional[str]:
        n = req.tokens
        if not self.budget.reserve(n):  # leak: n is clipped before it is given back, the difference stays used
            return None
        n = min(n, left)
        req.tokens = n
        answer = self.send(req)
        self.budget.unreserve(n)
        return answer

    def dispatch_grown(self, req: Ticketed, extra: int) -> Optional[str]:
        n = req.tokens
        if not self.budget.reserve(n):  # clean: unreserved together with the extra tokens
            return None
        if self.budget.reserve(extra):  # clean: near miss, n grows along with the reservation
            n += extra
        answer = self.send(req)
        self.budget.unreserve(n)
        return answer

    def dispatch_retry(self, req: Ticketed, tries: int) -> Optional[str]:
        for _ in range(tries):
            ticket = self.tickets.take()  # leak: a round without an answer goes on to the next with its ticket taken
            if ticket is None:
                return None
            req.ticket = ticket
            answer = self.send(req)
            if answer is not None:
                self.tickets.put_back(ticket)
                return answer
        return None

    def dispatch_once(self, req: Ticketed, tries: int) -> Optional[str]:
        ticket = None
        for _ in range(tries):
            if ticket is None:
                ticket = self.tickets.take()  # clean: near miss, taken once, kept between the rounds and put back behind them
            if ticket is None:
                continue
            req.ticket = ticket
            answer = self.send(req)
            if answer is not None:
                self.tickets.put_back(ticket)
                return answer
        if ticket is not None:
            self.tickets.put_back(ticket)
        return None

    def open_stream(self, req: Ticketed) -> bool:
        if req.rid in self.live:
            return False
        if self.budget.reserve(req.tokens):  # clean: near miss, counted tells close_stream about it, charged says how much
            req.counted = True
            req.charged = req.tokens
        self.live[req.rid] = req
        return req.counted

    def close_stream(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is not None and req.counted:
            self.budget.unreserve(req.charged)
            req.counted = False

    def split(self, reqs: List[Ticketed], half: int) -> List[str]:
        sent: List[str] = []
        for req in reqs:
            ticket = self.tickets.take_in_range(0, half)  # clean: put back when the tokens are refused, and after the send
            if ticket is None:
                break
            if not self.budget.reserve(req.tokens):  # clean: near miss, refused means nothing reserved, otherwise undone below
                self.tickets.put_back(ticket)
                continue
            req.ticket = ticket
            if self.send(req):
                sent.append(req.rid)
            self.budget.unreserve(req.tokens)
            self.tickets.put_back(ticket)
        return sent
