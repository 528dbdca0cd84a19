from __future__ import annotations

import time
from collections import deque
from typing import Callable, Protocol, Sequence as Seq

Pairs = Seq[tuple[object, object]]


class Driver(Protocol):
    def submit(self, ticket: int, pairs: Pairs) -> None: ...
    def completions(self) -> list[tuple[int, bool]]: ...
    def wait(self, ticket: int) -> None: ...


class TicketPool:
    """Numbers of the streams and events that the driver set up."""

    def __init__(self, count: int) -> None:
        self._idle: deque[int] = deque(range(count))

    def get(self) -> int | None:
        return self._idle.popleft() if self._idle else None  # clean: returned to the caller

    def put(self, ticket: int) -> None:
        self._idle.append(ticket)


class CopyEngine:
    def __init__(self, driver: Driver, tickets: TicketPool) -> None:
        self.driver = driver
        self.tickets = tickets
        self._inflight: dict[int, Callable[[bool], None]] = {}
        self._draining = False
        self.copied = 0

    def start(self, pairs: Pairs, on_done: Callable[[bool], None]) -> bool:
        """on_done is called by poll() with True or False, unless this returns False."""
        if self._draining:
            return False
        ticket = self.tickets.get()  # clean: near miss, waits in the in-flight table and poll() puts it back
        if ticket is None:
            return False
        self._inflight[ticket] = on_done
        self.driver.submit(ticket, pairs)
        return True

    def poll(self) -> int:
        finished = self.driver.completions()
        for ticket, ok in finished:
            on_done = self._inflight.pop(ticket)
            self.tickets.put(ticket)
            self.copied += ok
            on_done(ok)
        return len(finished)

    def measure(self, pairs: Pairs, repeats: int = 5) -> float | None:
        ticket = self.tickets.get()  # clean: the finally puts it back, None holds nothing
        if ticket is None:
            return None
        try:
            started = time.perf_counter()
            for _ in range(repeats):
                self.driver.submit(ticket, pairs)
                self.driver.wait(ticket)
            return (time.perf_counter() - started) / repeats
        finally:
            self.tickets.put(ticket)

    def drain(self) -> None:
        self._draining = True
        while self._inflight:
            self.poll()
