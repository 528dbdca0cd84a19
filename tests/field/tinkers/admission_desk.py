"""Admission for the Quayside scheduler: what may run, how much of it, and for whom."""
from __future__ import annotations

import collections
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Set


class TokenBudget:
    """Tokens that one scheduler step may still batch."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.committed = 0
        self.refusals = 0
        self._mu = threading.Lock()

    def reserve(self, tokens: int) -> bool:
        with self._mu:
            if self.committed + tokens > self.limit:
                self.refusals += 1
                return False
            self.committed += tokens
            return True

    def settle(self, tokens: int) -> None:
        with self._mu:
            if tokens > self.committed:
                raise AssertionError("settled more than was reserved")
            self.committed -= tokens


def run_chunk(budget: TokenBudget, chunk, engine) -> Optional[object]:
    if not budget.reserve(len(chunk)):  # leak: the engine error is swallowed and the tokens stay committed
        return None
    try:
        result = engine.forward(chunk)
    except RuntimeError:
        engine.reset()
        return None
    budget.settle(len(chunk))
    return result


def run_whole(budget: TokenBudget, tokens: List[int], engine):
    n = len(tokens)
    if not budget.reserve(n):  # clean: refused holds nothing, else settled in finally
        return None
    try:
        return engine.forward(tokens)
    except RuntimeError:
        return None
    finally:
        budget.settle(n)


def run_padded(budget: TokenBudget, tokens: List[int], engine, multiple: int = 64) -> None:
    padded = -(-len(tokens) // multiple) * multiple
    if budget.reserve(padded):  # leak: a request that fits no graph returns with its tokens committed
        graph = engine.graph_for(padded)
        if graph is None:
            engine.enqueue_eager(tokens)
            return
        graph.replay(tokens)
        budget.settle(padded)


class SeatChart:
    """Numbered seats of the running batch. The chart remembers who sits where."""

    def __init__(self, seats: int) -> None:
        self._who: List[Optional[str]] = [None] * seats
        self._vacant: Set[int] = set(range(seats))

    def check_in(self, rid: str) -> int:
        if not self._vacant:
            raise OverflowError("no seat")
        seat = min(self._vacant)
        self._vacant.remove(seat)
        self._who[seat] = rid
        return seat

    def retire(self, seat: int) -> str:
        rid = self._who[seat]
        if rid is None:
            raise KeyError(seat)
        self._who[seat] = None
        self._vacant.add(seat)
        return rid

    def occupied(self) -> int:
        return len(self._who) - len(self._vacant)


class Runner:
    def __init__(self, chart: SeatChart) -> None:
        self.chart = chart
        self.seat_of: Dict[str, int] = {}

    def begin(self, rid: str) -> None:
        if rid in self.seat_of:
            return
        self.seat_of[rid] = self.chart.check_in(rid)  # clean: retired in end

    def end(self, rid: str) -> None:
        seat = self.seat_of.pop(rid, None)
        if seat is not None:
            self.chart.retire(seat)


def warm_up(chart: SeatChart, model, lengths) -> List[float]:
    took = []
    for n in lengths:
        seat = chart.check_in(f"warm-{n}")  # leak: the break on a slow step skips the retire
        start = time.monotonic()
        model.step(seat, n)
        spent = time.monotonic() - start
        took.append(spent)
        if spent > 5.0:
            break
        chart.retire(seat)
    return took


class CreditRefused(Exception):
    pass


class TenantCredits:
    """Concurrent cost units by tenant; a draw is paid back when the request ends."""

    def __init__(self, grants: Dict[str, int]) -> None:
        self._grants = dict(grants)
        self._drawn: Dict[str, int] = collections.defaultdict(int)
        self._cv = threading.Condition()

    def draw(self, tenant: str, units: int, wait: float = 0.0) -> None:
        with self._cv:
            ok = self._cv.wait_for(lambda: self._drawn[tenant] + units <= self._grants.get(tenant, 0), wait)
            if not ok:
                raise CreditRefused(tenant)
            self._drawn[tenant] += units

    def refund(self, tenant: str, units: int) -> None:
        with self._cv:
            self._drawn[tenant] -= units
            self._cv.notify_all()

    def outstanding(self, tenant: str) -> int:
        return self._drawn.get(tenant, 0)


def serve(credits: TenantCredits, req, backend) -> str:
    try:
        credits.draw(req.tenant, req.cost)  # clean: refused holds nothing, else refunded in finally
    except CreditRefused:
        return "429"
    try:
        return backend.call(req)
    finally:
        credits.refund(req.tenant, req.cost)


def serve_pair(credits: TenantCredits, payer: str, guest: str, cost: int, backend) -> str:
    credits.draw(payer, cost)  # leak: when the guest is refused the payer's draw is not refunded
    try:
        credits.draw(guest, cost)  # clean: refused holds nothing, else refunded after the call
    except CreditRefused:
        return "429"
    try:
        return backend.call_pair(payer, guest)
    finally:
        credits.refund(guest, cost)
        credits.refund(payer, cost)


class Gatehouse:
    """Counts who is inside so that a weight reload can wait for an empty house."""

    def __init__(self) -> None:
        self._cond = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> bool:
        with self._cond:
            if self._shut:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._cond:
            self._inside -= 1
            if self._inside == 0:
                self._cond.notify_all()

    @contextlib.contextmanager
    def visit(self):
        if not self.enter():
            raise RuntimeError("reloading")
        try:
            yield
        finally:
            self.leave()

    def shut_and_drain(self) -> None:
        with self._cond:
            self._shut = True
            while self._inside:
                self._cond.wait()

    def reopen(self) -> None:
        with self._cond:
            self._shut = False


def score(gate: Gatehouse, model, prompts) -> List[float]:
    with gate.visit():  # clean: left by the context manager
        return [model.score(p) for p in prompts]


def embed(gate: Gatehouse, model, text: str) -> Optional[list]:
    if not gate.enter():  # leak: empty texts return from inside the house
        return None
    text = text.strip()
    if not text:
        return []
    vec = model.embed(text)
    gate.leave()
    return vec


def stream_out(gate: Gatehouse, model, prompt: str):
    if not gate.enter():  # clean: near miss, left when the generator ends or is closed
        return
    try:
        for piece in model.stream(prompt):
            if piece.stop:
                return
            yield piece.text
    finally:
        gate.leave()


@dataclass
class Wave:
    roster: "WaveRoster"
    number: int
    members: List[str]
    sealed: bool = False

    def seal(self) -> List[str]:
        self.sealed = True
        self.roster._finish(self)
        return self.members

    def scrap(self) -> None:
        self.members.clear()
        self.roster._finish(self)


class WaveRoster:
    """At most a few waves form at once; a wave closes by its own seal or scrap."""

    def __init__(self, at_once: int = 2) -> None:
        self._at_once = at_once
        self._forming: Dict[int, Wave] = {}
        self._count = 0

    def open_wave(self) -> Wave:
        if len(self._forming) >= self._at_once:
            raise RuntimeError("too many waves are forming")
        self._count += 1
        wave = Wave(self, self._count, [])
        self._forming[wave.number] = wave
        return wave

    def _finish(self, wave: Wave) -> None:
        if self._forming.pop(wave.number, None) is None:
            raise RuntimeError("wave is finished already")


def form(roster: WaveRoster, waiting: List[str], most: int) -> Optional[List[str]]:
    wave = roster.open_wave()  # leak: an empty wave is neither sealed nor scrapped
    while waiting and len(wave.members) < most:
        wave.members.append(waiting.pop(0))
    if not wave.members:
        return None
    return wave.seal()


def form_strict(roster: WaveRoster, waiting: List[str], exactly: int) -> List[str]:
    wave = roster.open_wave()  # clean: scrapped when short, sealed when full
    wave.members.extend(waiting[:exactly])
    if len(wave.members) != exactly:
        wave.scrap()
        return []
    del waiting[:exactly]
    return wave.seal()


class ArrivalQueue:
    """Requests in order of arrival. What is popped is work, and is gone."""

    def __init__(self) -> None:
        self._items: collections.deque = collections.deque()

    def push(self, req) -> None:
        self._items.append(req)

    def pop(self):
        return self._items.popleft() if self._items else None


def shed_expired(arrivals: ArrivalQueue, now: float) -> int:
    shed = 0
    while True:
        req = arrivals.pop()  # clean: a queue of work, nothing has to come back
        if req is None:
            return shed
        if req.deadline < now:
            shed += 1
            continue
        req.start()
