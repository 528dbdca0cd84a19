from __future__ import annotations

import time
from collections import deque
from typing import Deque, Dict, List, Optional, Tuple

from .kv import KVManager, KVSpan
from .request import GenRequest


class ChunkScheduler:
    """Admits whole requests; preempts the youngest when a chunk does not fit."""

    def __init__(self, mgr: KVManager) -> None:
        self.mgr = mgr
        self.waiting: Deque[GenRequest] = deque()
        self.running: Dict[int, GenRequest] = {}

    def admit(self) -> List[GenRequest]:
        started: List[GenRequest] = []
        while self.waiting:
            req = self.waiting.popleft()
            span = self.mgr.claim(req.pages_needed())  # clean: near miss, moved into the request, complete() and preempt() give it up
            if span is None:
                self.waiting.appendleft(req)
                break
            req.kv = span
            self.running[req.rid] = req
            started.append(req)
        return started

    def grow(self, req: GenRequest, pages: int) -> bool:
        bigger = self.mgr.claim(pages)  # clean: near miss, replaces the span that is given up first
        if bigger is None:
            return False
        req.give_up_kv(self.mgr)
        req.kv = bigger
        return True

    def preempt(self) -> Optional[GenRequest]:
        if not self.running:
            return None
        _, victim = self.running.popitem()
        victim.give_up_kv(self.mgr)
        self.waiting.appendleft(victim)
        return victim

    def complete(self, rid: int) -> None:
        req = self.running.pop(rid, None)
        if req is not None:
            req.give_up_kv(self.mgr)


class FifoScheduler:
    def __init__(self, mgr: KVManager, max_running: int = 4) -> None:
        self.mgr = mgr
        self.max_running = max_running
        self.waiting: Deque[GenRequest] = deque()
        self.running: Dict[int, GenRequest] = {}

    def admit(self) -> int:
        n = 0
        while self.waiting and len(self.running) < self.max_running:
            span = self.mgr.claim(self.waiting[0].pages_needed())  # leak: preempt() clears req.kv and requeues without giving it up
            if span is None:
                break
            req = self.waiting.popleft()
            req.kv = span
            self.running[req.rid] = req
            n += 1
        return n

    def admit_one(self, req: GenRequest) -> bool:
        span = self.mgr.claim(req.pages_needed())  # leak: a full running set refuses the request with the span taken
        if span is None or len(self.running) >= self.max_running:
            self.waiting.append(req)
            return False
        req.kv = span
        self.running[req.rid] = req
        return True

    def preempt(self) -> None:
        _, victim = self.running.popitem()
        victim.kv = None
        victim.output.clear()
        self.waiting.appendleft(victim)

    def complete(self, rid: int) -> None:
        self.running.pop(rid).give_up_kv(self.mgr)


class ParkingLot:
    """Spans of idle chats, kept for a while in case the user goes on."""

    def __init__(self, mgr: KVManager, ttl: float) -> None:
        self.mgr = mgr
        self.ttl = ttl
        self._parked: Dict[int, Tuple[float, KVSpan]] = {}
        self._hot: Dict[int, KVSpan] = {}

    async def park_new(self, rid: int, pages: int) -> None:
        span = await self.mgr.claim_wait(pages)  # leak: expire() rebuilds the table without the stale spans
        self._parked[rid] = (time.monotonic(), span)

    def expire(self, now: float) -> int:
        before = len(self._parked)
        self._parked = {r: e for r, e in self._parked.items() if now - e[0] < self.ttl}
        return before - len(self._parked)

    def resume(self, req: GenRequest) -> bool:
        entry = self._parked.pop(req.rid, None)
        if entry is None:
            return False
        req.give_up_kv(self.mgr)
        req.kv = entry[1]
        return True

    async def heat(self, rid: int, pages: int) -> None:
        fresh = await self.mgr.claim_wait(pages)  # clean: near miss, the span it replaces is relinquished, cool_all() does the rest
        stale = self._hot.pop(rid, None)
        self._hot[rid] = fresh
        if stale is not None:
            self.mgr.relinquish(stale)

    def cool_all(self) -> None:
        while self._hot:
            _, span = self._hot.popitem()
            self.mgr.relinquish(span)
