"""Streaming sessions of the inference gateway: slots, callbacks and background work."""
from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Callable, Optional, Protocol

log = logging.getLogger("stream_sessions")


class Lessor(Protocol):
    def enter(self, weight: int) -> Optional["Seat"]: ...

    def leave(self, seat: "Seat") -> None: ...


@dataclass(eq=False)
class Seat:
    number: int
    weight: int
    since: float = field(default_factory=time.monotonic)


class SeatMap:
    """Seats on one replica. Whoever enters also leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken: dict[int, Seat] = {}
        self._counter = 0
        self._lock = threading.Lock()

    def enter(self, weight: int) -> Optional[Seat]:
        with self._lock:
            if sum(s.weight for s in self._taken.values()) + weight > self._capacity:
                return None
            self._counter += 1
            seat = Seat(self._counter, weight)
            self._taken[seat.number] = seat
            return seat

    def leave(self, seat: Seat) -> None:
        with self._lock:
            self._taken.pop(seat.number, None)

    def enter_any(self, weights: list[int]) -> Optional[Seat]:
        """The largest seat that fits."""
        for weight in sorted(weights, reverse=True):
            seat = self.enter(weight)  # clean: near miss, the first one that exists is returned
            if seat is not None:
                return seat
        return None


class Session:
    """One client. on_close callbacks run once, in reverse order."""

    def __init__(self, sid: str) -> None:
        self.sid = sid
        self.sent = 0
        self.closed = False
        self._callbacks: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        if self.closed:
            callback()
            return
        self._callbacks.append(callback)

    def send(self, chunk: str) -> bool:
        if self.closed:
            return False
        self.sent += len(chunk)
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        while self._callbacks:
            self._callbacks.pop()()


class Gateway:
    def __init__(self, seats: Lessor, executor: Executor, model: Callable[[str], list[str]]) -> None:
        self.seats = seats
        self.executor = executor
        self.model = model
        self.sessions: dict[str, Session] = {}
        self.held: dict[str, Seat] = {}
        self.watchers: dict[str, list[Seat]] = {}
        self.busy = 0

    def connect(self, sid: str) -> Optional[Session]:
        if sid in self.sessions:
            return self.sessions[sid]
        seat = self.seats.enter(1)  # clean: near miss, the close callback of the session leaves it
        if seat is None:
            self.busy += 1
            return None
        session = Session(sid)
        session.on_close(lambda: self.seats.leave(seat))
        self.sessions[sid] = session
        return session

    def disconnect(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            session.close()
        for seat in self.watchers.pop(sid, []):
            log.debug("watcher %d of %s ended", seat.number, sid)
        kept = self.held.pop(sid, None)
        if kept is not None:
            self.seats.leave(kept)

    def upgrade(self, sid: str, weight: int) -> bool:
        """A heavier seat next to the first, for long prompts."""
        session = self.sessions[sid]
        if sid in self.held:
            return True
        seat = self.seats.enter(weight)  # clean: near miss, disconnect() leaves what is held
        if seat is None:
            return False
        self.held[sid] = seat
        session.sent = 0
        return True

    def watch(self, sid: str) -> bool:
        if sid not in self.sessions:
            return False
        seat = self.seats.enter(1)  # leak: disconnect() pops the watchers and leaves none of their seats
        if seat is None:
            return False
        self.watchers.setdefault(sid, []).append(seat)
        return True

    def reply(self, sid: str, prompt: str) -> int:
        session = self.sessions[sid]
        seat = self.seats.enter(len(prompt))  # leak: the loop returns when the client is gone
        if seat is None:
            return 0
        for chunk in self.model(prompt):
            if not session.send(chunk):
                log.info("client %s went away", sid)
                return session.sent
        self.seats.leave(seat)
        return session.sent

    def reply_fully(self, sid: str, prompt: str) -> int:
        session = self.sessions[sid]
        seat = self.seats.enter(len(prompt))  # clean: near miss, break reaches the leave as well
        if seat is None:
            return 0
        for chunk in self.model(prompt):
            if not session.send(chunk):
                break
        self.seats.leave(seat)
        return session.sent

    def submit(self, prompt: str) -> Optional[Future]:
        seat = self.seats.enter(len(prompt))  # clean: near miss, the done callback leaves it
        if seat is None:
            return None
        future = self.executor.submit(self.model, prompt)
        future.add_done_callback(lambda _: self.seats.leave(seat))
        return future

    def submit_timed(self, prompt: str) -> Optional[Future]:
        seat = self.seats.enter(len(prompt))  # leak: the done callback writes the time and leaves nothing
        if seat is None:
            return None

        def finished(_: Future) -> None:
            log.info("seat %d ran for %.3f s", seat.number, time.monotonic() - seat.since)

        future = self.executor.submit(self.model, prompt)
        future.add_done_callback(finished)
        return future

    def submit_owned(self, prompt: str) -> bool:
        seat = self.seats.enter(len(prompt))  # clean: near miss, the worker that gets the seat leaves it
        if seat is None:
            return False
        self.executor.submit(self._work, seat, prompt)
        return True

    def _work(self, seat: Seat, prompt: str) -> int:
        try:
            return sum(len(chunk) for chunk in self.model(prompt))
        finally:
            self.seats.leave(seat)

    def submit_ranked(self, prompt: str, rank: int) -> bool:
        seat = self.seats.enter(len(prompt))  # leak: the worker keeps the seat of a prompt without rank
        if seat is None:
            return False
        self.executor.submit(self._ranked, seat, prompt, rank)
        return True

    def _ranked(self, seat: Seat, prompt: str, rank: int) -> int:
        if rank <= 0:
            return 0
        total = sum(len(chunk) for chunk in self.model(prompt)[:rank])
        self.seats.leave(seat)
        return total

    def run(self, prompt: str, seat: Optional[Seat] = None) -> list[str]:
        """With a seat of the caller, or with one of its own."""
        own = seat is None
        if own:
            seat = self.seats.enter(len(prompt))  # clean: near miss, left under the same flag
            if seat is None:
                return []
        chunks = self.model(prompt)
        if own:
            self.seats.leave(seat)
        return chunks

    def run_pair(self, left: str, right: str) -> list[str]:
        seat = self.seats.enter(len(left) + len(right))  # leak: run() does not leave the seat of its caller
        if seat is None:
            return []
        out = self.run(left, seat)
        out.extend(self.run(right, seat))
        return out

    def shutdown(self) -> None:
        for sid in list(self.sessions):
            self.disconnect(sid)
