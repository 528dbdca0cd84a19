"""Reward service client: permits per reward model, pooled connections, judge token budget."""
from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Optional


class PermitGate:
    """At most ``limits[model]`` scoring calls at a time."""

    def __init__(self, limits: dict[str, int]):
        self._sems = {m: threading.BoundedSemaphore(n) for m, n in limits.items()}

    def enter(self, model: str, timeout: float = 10.0) -> bool:
        return self._sems[model].acquire(timeout=timeout)  # clean: the caller holds the permit and calls leave()

    def leave(self, model: str) -> None:
        self._sems[model].release()


class ScoreConn:
    def __init__(self, endpoint: str, session):
        self.endpoint = endpoint
        self.session = session
        self.used_at = time.monotonic()

    def stale(self) -> bool:
        return time.monotonic() - self.used_at > 60.0

    def post(self, payload: dict):
        self.used_at = time.monotonic()
        return self.session.post(self.endpoint, json=payload, timeout=30)

    def shut(self) -> None:
        self.session.close()


class ConnCache:
    def __init__(self, make: Callable[[str], ScoreConn], per_endpoint: int):
        self._make = make
        self._cap = per_endpoint
        self._idle: dict[str, queue.LifoQueue] = defaultdict(queue.LifoQueue)
        self._out: dict[str, int] = defaultdict(int)
        self._mu = threading.Lock()

    def lease(self, endpoint: str) -> Optional[ScoreConn]:
        while True:
            try:
                conn = self._idle[endpoint].get_nowait()  # clean: near miss, a stale one is discarded, which lowers the count
            except queue.Empty:
                break
            if not conn.stale():
                return conn
            self.discard(conn)
        with self._mu:
            if self._out[endpoint] >= self._cap:
                return None
            self._out[endpoint] += 1
        return self._make(endpoint)

    def restore(self, conn: ScoreConn) -> None:
        self._idle[conn.endpoint].put(conn)

    def discard(self, conn: ScoreConn) -> None:
        conn.shut()
        with self._mu:
            self._out[conn.endpoint] -= 1

    @contextmanager
    def leased(self, endpoint: str):
        conn = self.lease(endpoint)  # clean: restored or discarded below
        if conn is None:
            raise TimeoutError(endpoint)
        try:
            yield conn
        except ConnectionError:
            self.discard(conn)
            raise
        except BaseException:
            self.restore(conn)
            raise
        self.restore(conn)


class TokenBudget:
    """Tokens in flight at the judge model."""

    def __init__(self, total: int):
        self._left = total
        self._mu = threading.Lock()

    def reserve(self, n: int) -> bool:
        with self._mu:
            if n > self._left:
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._mu:
            self._left += n


@dataclass
class Sample:
    uid: str
    prompt: str
    answer: str
    n_tokens: int


@dataclass
class Pending:
    sample: Sample
    model: str
    deadline: float
    conn: ScoreConn | None = None


class RewardService:
    def __init__(self, gate: PermitGate, conns: ConnCache, budget: TokenBudget, endpoints: dict[str, str]):
        self.gate = gate
        self.conns = conns
        self.budget = budget
        self.endpoints = endpoints
        self.pending: dict[str, Pending] = {}

    def _parse(self, reply) -> Optional[float]:
        return reply.json()["score"] if reply.status_code == 200 else None

    def score(self, model: str, s: Sample) -> Optional[float]:
        if not self.gate.enter(model):  # leak: no leave() when no connection can be had
            return None
        conn = self.conns.lease(self.endpoints[model])  # clean: restored in finally
        if conn is None:
            return None
        try:
            return self._parse(conn.post({"prompt": s.prompt, "answer": s.answer}))
        finally:
            self.conns.restore(conn)
            self.gate.leave(model)

    def score_group(self, model: str, group: list[Sample], permit_held: bool = False) -> list[Optional[float]]:
        if not permit_held and not self.gate.enter(model):  # clean: near miss, left below under the same flag
            return [None] * len(group)
        try:
            with self.conns.leased(self.endpoints[model]) as conn:  # clean: the context manager settles it
                return [self._parse(conn.post({"prompt": s.prompt, "answer": s.answer})) for s in group]
        finally:
            if not permit_held:
                self.gate.leave(model)

    def judge(self, s: Sample) -> Optional[float]:
        if not self.budget.reserve(s.n_tokens):  # leak: a 429 returns before the refund
            return None
        try:
            with self.conns.leased(self.endpoints["judge"]) as conn:  # clean: the context manager settles it
                reply = conn.post({"prompt": s.prompt, "answer": s.answer})
        except (ConnectionError, TimeoutError):
            self.budget.refund(s.n_tokens)
            return None
        if reply.status_code == 429:
            return None
        self.budget.refund(s.n_tokens)
        return self._parse(reply)

    def score_with_retry(self, model: str, s: Sample, tries: int = 4) -> Optional[float]:
        for i in range(tries):
            conn = self.conns.lease(self.endpoints[model])  # leak: the connection is neither discarded nor restored after a ConnectionError
            if conn is None:
                time.sleep(0.1 * 2 ** i)
                continue
            try:
                reply = conn.post({"prompt": s.prompt, "answer": s.answer})
            except ConnectionError:
                time.sleep(0.1 * 2 ** i)
                continue
            self.conns.restore(conn)
            return self._parse(reply)
        return None

    def score_patient(self, model: str, s: Sample, tries: int = 4) -> Optional[float]:
        conn = None
        try:
            for i in range(tries):
                if conn is None:
                    conn = self.conns.lease(self.endpoints[model])  # clean: near miss, rebound only after a discard and restored in finally
                if conn is None:
                    time.sleep(0.1)
                    continue
                try:
                    return self._parse(conn.post({"prompt": s.prompt, "answer": s.answer}))
                except ConnectionError:
                    self.conns.discard(conn)
                    conn = None
            return None
        finally:
            if conn is not None:
                self.conns.restore(conn)

    def ensemble(self, models: list[str], s: Sample) -> Optional[float]:
        for model in models:
            if not self.gate.enter(model, timeout=1.0):  # leak: permits of the models before a busy one are not left
                return None
        try:
            scores = [self._post_once(m, s) for m in models]
        finally:
            for model in models:
                self.gate.leave(model)
        good = [x for x in scores if x is not None]
        return sum(good) / len(good) if good else None

    def ensemble_best_effort(self, models: list[str], s: Sample) -> Optional[float]:
        entered: list[str] = []
        try:
            for model in models:
                if self.gate.enter(model, timeout=0.2):  # clean: near miss, only what was entered is scored and left
                    entered.append(model)
            scores = [self._post_once(m, s) for m in entered]
        finally:
            while entered:
                self.gate.leave(entered.pop())
        good = [x for x in scores if x is not None]
        return sum(good) / len(good) if good else None

    def _post_once(self, model: str, s: Sample) -> Optional[float]:
        with self.conns.leased(self.endpoints[model]) as conn:  # clean: the context manager settles it
            return self._parse(conn.post({"prompt": s.prompt, "answer": s.answer}))

    def submit(self, model: str, s: Sample, ttl: float) -> bool:
        """Start a score that a webhook completes later."""
        conn = self.conns.lease(self.endpoints[model])  # leak: expire() forgets the pending entry and its connection
        if conn is None:
            return False
        self.pending[s.uid] = Pending(s, model, time.monotonic() + ttl, conn)
        conn.session.send_async({"uid": s.uid, "prompt": s.prompt, "answer": s.answer})
        return True

    def complete(self, uid: str, score: float) -> Optional[float]:
        entry = self.pending.pop(uid, None)
        if entry is None:
            return None
        self.conns.restore(entry.conn)
        return score

    def expire(self) -> list[str]:
        now = time.monotonic()
        late = [uid for uid, p in self.pending.items() if p.deadline < now]
        for uid in late:
            del self.pending[uid]
        return late
