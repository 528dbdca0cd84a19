"""Router to model workers: seats by load, RPC connections, sticky sessions, retry and hedging."""
from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger("router")


class WorkerGone(Exception):
    pass


@dataclass(order=True)
class Worker:
    load: int
    addr: str = field(compare=False)
    draining: bool = field(default=False, compare=False)


class SeatBook:
    """Least loaded first. A seat is one count of a worker's load."""

    def __init__(self, addrs: List[str], max_load: int) -> None:
        self.workers = {a: Worker(0, a) for a in addrs}
        self.max_load = max_load
        self._lock = threading.Lock()

    def seat(self, prefer: Optional[str] = None) -> Optional[Worker]:
        with self._lock:
            w = self.workers.get(prefer) if prefer else None
            if w is None or w.draining or w.load >= self.max_load:
                ready = [x for x in self.workers.values() if not x.draining]
                w = min(ready, default=None)
            if w is None or w.load >= self.max_load:
                return None
            w.load += 1
            return w

    def unseat(self, w: Worker) -> None:
        with self._lock:
            w.load -= 1


class WireCache:
    def __init__(self, connect: Callable[[str], Any]) -> None:
        self._connect = connect
        self._idle: Dict[str, List[Tuple[float, int, Any]]] = {}
        self._seq = 0

    def wire(self, addr: str) -> Any:
        lst = self._idle.setdefault(addr, [])
        while lst:
            _, _, c = heapq.heappop(lst)  # clean: closed when it isn't alive, else returned
            if c.alive():
                return c
            c.close()
        return self._connect(addr)

    def wire_fresh(self, addr: str, max_age: float) -> Any:
        lst = self._idle.setdefault(addr, [])
        while lst:
            stamp, _, c = heapq.heappop(lst)  # leak: an aged connection is neither closed nor stowed
            if time.monotonic() - stamp > max_age:
                continue
            return c
        return self._connect(addr)

    def stow(self, addr: str, c: Any) -> None:
        self._seq += 1
        heapq.heappush(self._idle.setdefault(addr, []), (time.monotonic(), self._seq, c))


class Router:
    def __init__(self, seats: SeatBook, wires: WireCache, retries: int = 3) -> None:
        self.seats = seats
        self.wires = wires
        self.retries = retries
        self.sessions: Dict[str, Worker] = {}

    @contextlib.contextmanager
    def seated(self, prefer: Optional[str] = None) -> Iterator[Worker]:
        w = self.seats.seat(prefer)  # clean: unseated in finally
        if w is None:
            raise WorkerGone("no seats")
        try:
            yield w
        finally:
            self.seats.unseat(w)

    def call(self, body: Dict[str, Any]) -> Any:
        last: Optional[Exception] = None
        for i in range(self.retries):
            w = self.seats.seat()  # leak: a failed attempt goes on to the next seat without unseating
            if w is None:
                time.sleep(0.05 * (i + 1))
                continue
            c = self.wires.wire(w.addr)  # clean: closed on an error, else stowed
            try:
                reply = c.call("generate", body)
            except ConnectionError as e:
                c.close()
                last = e
                continue
            self.wires.stow(w.addr, c)
            self.seats.unseat(w)
            return reply
        raise WorkerGone(str(last))

    def call_safe(self, body: Dict[str, Any]) -> Any:
        for _ in range(self.retries):
            with self.seated() as w:  # clean: a context manager, also on continue
                c = self.wires.wire(w.addr)  # clean: closed on an error, else stowed
                try:
                    reply = c.call("generate", body)
                except ConnectionError:
                    c.close()
                    continue
                self.wires.stow(w.addr, c)
                return reply
        raise WorkerGone("retries")

    def session(self, sid: str) -> Worker:
        w = self.sessions.get(sid)
        if w is not None and not w.draining:
            return w
        fresh = self.seats.seat()  # clean: held by sessions, and the old seat is given up
        if fresh is None:
            raise WorkerGone(sid)
        if w is not None:
            self.seats.unseat(w)
        self.sessions[sid] = fresh
        return fresh

    def end_session(self, sid: str) -> None:
        w = self.sessions.pop(sid, None)
        if w is not None:
            self.seats.unseat(w)

    def migrate(self, sid: str, target: str) -> bool:
        w = self.seats.seat(prefer=target)  # leak: not unseated when the seat is on another worker
        if w is None or w.addr != target:
            return False
        old = self.sessions.pop(sid, None)
        if old is not None:
            self.seats.unseat(old)
        self.sessions[sid] = w
        return True

    def hedge(self, body: Dict[str, Any], budget: float) -> Any:
        first = self.seats.seat()  # clean: unseated in finally
        if first is None:
            raise WorkerGone("hedge")
        second = None
        try:
            c = self.wires.wire(first.addr)  # leak: neither stowed nor closed when the poll runs out
            if c.poll("generate", body, budget):
                out = c.result()
                self.wires.stow(first.addr, c)
                return out
            second = self.seats.seat()  # clean: near miss, None at first, unseated in finally if set
            if second is None:
                return None
            d = self.wires.wire(second.addr)  # clean: stowed after the call
            out = d.call("generate", body)
            self.wires.stow(second.addr, d)
            return out
        finally:
            self.seats.unseat(first)
            if second is not None:
                self.seats.unseat(second)

    def health(self) -> Dict[str, bool]:
        out = {}
        for addr in self.seats.workers:
            c = self.wires.wire(addr)  # clean: near miss, stowed or closed by the ping's answer
            ok = c.call("ping") == "pong"
            out[addr] = ok
            if not ok:
                c.close()
                continue
            self.wires.stow(addr, c)
        return out

    def model_list(self) -> List[str]:
        names: List[str] = []
        for addr in self.seats.workers:
            c = self.wires.wire(addr)  # leak: break on a complete list passes over stow
            names.extend(c.call("models"))
            if "*" in names:
                break
            self.wires.stow(addr, c)
        return names

    def close(self) -> None:
        for sid in list(self.sessions):
            self.end_session(sid)
