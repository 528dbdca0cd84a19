"""Streams and events of the copy engine: pooled events, side streams and fences between them."""
from __future__ import annotations

import collections
import threading
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import torch


class EventPool:
    def __init__(self, prealloc: int = 64):
        self._idle: Deque[torch.cuda.Event] = collections.deque(torch.cuda.Event() for _ in range(prealloc))
        self._mu = threading.Lock()
        self.issued = 0

    def obtain(self) -> torch.cuda.Event:
        with self._mu:
            self.issued += 1
            return self._idle.popleft() if self._idle else torch.cuda.Event()

    def recycle(self, ev: torch.cuda.Event) -> None:
        with self._mu:
            self.issued -= 1
            self._idle.append(ev)


class StreamPool:
    """Few side streams, each in the hands of one user."""

    def __init__(self, count: int):
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._holder: List[Optional[str]] = [None] * count

    def borrow(self, who: str) -> Optional[int]:
        for i, holder in enumerate(self._holder):
            if holder is None:
                self._holder[i] = who
                return i
        return None

    def hand_back(self, index: int) -> None:
        self._holder[index] = None

    def __getitem__(self, index: int) -> torch.cuda.Stream:
        return self._streams[index]


events = EventPool()


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    ev = events.obtain()  # clean: returned to the caller
    ev.record(stream)
    return ev


def record_current() -> torch.cuda.Event:
    return record(torch.cuda.current_stream())  # clean: returned to the caller


def order_after(later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
    ev = record(earlier)  # clean: recycled, the wait is already enqueued
    later.wait_event(ev)
    events.recycle(ev)


def order_current_after(earlier: torch.cuda.Stream, unless_same: bool) -> None:
    ev = record(earlier)  # leak: returns with the event when the stream is the current one
    here = torch.cuda.current_stream()
    if unless_same and here == earlier:
        return
    here.wait_event(ev)
    events.recycle(ev)


def is_idle(stream: torch.cuda.Stream) -> bool:
    return record(stream).query()  # leak: the event is queried and dropped


def finished(work: Callable[[], Any], timeout_polls: int) -> bool:
    work()
    ev = record_current()  # leak: break leaves the loop to a return without recycle
    for _ in range(timeout_polls):
        if ev.query():
            break
    else:
        events.recycle(ev)
        return False
    return True


class Reaper:
    """Calls back and recycles events once the device has passed them."""

    def __init__(self) -> None:
        self._waiting: Deque[Tuple[torch.cuda.Event, Callable[[], None]]] = collections.deque()

    def when_done(self, stream: torch.cuda.Stream, fn: Callable[[], None]) -> None:
        ev = record(stream)  # clean: near miss, poll recycles it
        self._waiting.append((ev, fn))

    def poll(self) -> int:
        done = 0
        while self._waiting and self._waiting[0][0].query():
            ev, fn = self._waiting.popleft()
            events.recycle(ev)
            fn()
            done += 1
        return done

    def flush(self) -> None:
        while self._waiting:
            self._waiting[0][0].synchronize()
            self.poll()


class CopyEngine:
    """Host/device copies on side streams."""

    def __init__(self, pool: StreamPool, reaper: Reaper):
        self.pool = pool
        self.reaper = reaper
        self._tickets: Dict[int, torch.cuda.Event] = {}
        self._prefetched: Dict[str, Tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._next = 0
        self.sync_copies = 0

    def copy_out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        side = self.pool.borrow("copy_out")  # clean: near miss, the reaper's callback hands it back
        if side is None:
            dst.copy_(src)
            self.sync_copies += 1
            return
        order_after(self.pool[side], torch.cuda.current_stream())
        with torch.cuda.stream(self.pool[side]):
            dst.copy_(src, non_blocking=True)
        self.reaper.when_done(self.pool[side], lambda: self.pool.hand_back(side))

    def copy_in(self, src: torch.Tensor, dst: torch.Tensor, small: int = 1 << 16) -> None:
        side = self.pool.borrow("copy_in")  # leak: small copies return without handing the stream back
        if side is None or src.numel() < small:
            dst.copy_(src)
            self.sync_copies += 1
            return
        with torch.cuda.stream(self.pool[side]):
            dst.copy_(src, non_blocking=True)
        order_after(torch.cuda.current_stream(), self.pool[side])
        self.pool.hand_back(side)

    def submit(self, src: torch.Tensor, dst: torch.Tensor) -> int:
        """A ticket for wait or cancel."""
        dst.copy_(src, non_blocking=True)
        self._next += 1
        self._tickets[self._next] = record_current()  # clean: near miss, wait and cancel both recycle
        return self._next

    def wait(self, ticket: int) -> None:
        ev = self._tickets.pop(ticket)
        ev.synchronize()
        events.recycle(ev)

    def cancel(self, ticket: int) -> bool:
        ev = self._tickets.pop(ticket, None)
        if ev is None:
            return False
        events.recycle(ev)
        return True

    def prefetch(self, name: str, src: torch.Tensor, dst: torch.Tensor) -> None:
        if name in self._prefetched:
            return
        dst.copy_(src, non_blocking=True)
        self._prefetched[name] = (dst, record_current())  # leak: fetch waits for the event and drops it

    def fetch(self, name: str) -> torch.Tensor:
        tensor, ev = self._prefetched.pop(name)
        torch.cuda.current_stream().wait_event(ev)
        return tensor

    def fan_out(self, src: torch.Tensor, dsts: List[torch.Tensor]) -> None:
        sides: List[int] = []
        for dst in dsts:
            side = self.pool.borrow("fan_out")  # clean: collected in sides, handed back after the copies
            if side is None:
                dst.copy_(src)
                continue
            sides.append(side)
            with torch.cuda.stream(self.pool[side]):
                dst.copy_(src, non_blocking=True)
        for side in sides:
            order_after(torch.cuda.current_stream(), self.pool[side])
            self.pool.hand_back(side)

    def reserve_pair(self, who: str) -> Optional[Tuple[int, int]]:
        """Two streams for the caller to hand back, or none."""
        up = self.pool.borrow(who)  # clean: returned in the pair, or handed back
        if up is None:
            return None
        down = self.pool.borrow(who)  # clean: returned in the pair, or None
        if down is None:
            self.pool.hand_back(up)
            return None
        return up, down

    def roundtrip(self, dev: torch.Tensor, host: torch.Tensor) -> bool:
        pair = self.reserve_pair("roundtrip")  # leak: only the first stream of the pair is handed back
        if pair is None:
            return False
        up, down = pair
        with torch.cuda.stream(self.pool[down]):
            host.copy_(dev, non_blocking=True)
        order_after(self.pool[up], self.pool[down])
        with torch.cuda.stream(self.pool[up]):
            dev.copy_(host, non_blocking=True)
        order_after(torch.cuda.current_stream(), self.pool[up])
        self.pool.hand_back(up)
        return True

    def exchange(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        pair = self.reserve_pair("exchange")  # clean: near miss, both are handed back in the loop
        if pair is None:
            return False
        held = a.clone()
        for side, (dst, src) in zip(pair, ((a, b), (b, held))):
            order_after(self.pool[side], torch.cuda.current_stream())
            with torch.cuda.stream(self.pool[side]):
                dst.copy_(src)
        for side in pair:
            order_after(torch.cuda.current_stream(), self.pool[side])
            self.pool.hand_back(side)
        return True
