"""Router side connections to inference workers: pool, breaker wrapper, retries, streaming."""
from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import defaultdict, deque
from typing import Iterator


class WorkerGone(ConnectionError):
    pass


class Wire:
    def __init__(self, addr: tuple[str, int]) -> None:
        self.addr = addr
        self.sock = socket.create_connection(addr, timeout=5.0)
        self.rfile = self.sock.makefile("rb")
        self.broken = False

    def send(self, msg: dict) -> None:
        self.sock.sendall(json.dumps(msg).encode() + b"\n")

    def recv(self) -> dict | None:
        line = self.rfile.readline()
        return json.loads(line) if line else None

    def shut(self) -> None:
        self.sock.close()


class WirePool:
    def __init__(self, per_worker: int = 32) -> None:
        self._idle: dict[tuple[str, int], deque[Wire]] = defaultdict(deque)
        self._caps: dict[tuple[str, int], threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(per_worker))
        self._mu = threading.Lock()

    def dial(self, addr: tuple[str, int]) -> Wire:
        self._caps[addr].acquire()  # clean: goes with the wire, or released when the connect fails
        with self._mu:
            if self._idle[addr]:
                return self._idle[addr].pop()  # clean: handed to the caller
        try:
            return Wire(addr)
        except OSError as e:
            self._caps[addr].release()
            raise WorkerGone(str(addr)) from e

    def dial_now(self, addr: tuple[str, int]) -> Wire | None:
        if not self._caps[addr].acquire(blocking=False):  # leak: no idle wire, and the count is not released
            return None
        with self._mu:
            if not self._idle[addr]:
                return None
            return self._idle[addr].pop()  # clean: handed to the caller

    def hang_up(self, wire: Wire) -> None:
        if wire.broken:
            wire.shut()
        else:
            with self._mu:
                self._idle[wire.addr].append(wire)
        self._caps[wire.addr].release()


class GuardedPool:
    """Refuses workers that have failed lately."""

    def __init__(self, inner: WirePool, cool_s: float = 3.0) -> None:
        self.inner = inner
        self.cool_s = cool_s
        self.bad_until: dict[tuple[str, int], float] = {}
        self.draining: set[tuple[str, int]] = set()

    def dial(self, addr: tuple[str, int]) -> Wire:
        if self.bad_until.get(addr, 0.0) > time.monotonic():
            raise WorkerGone(f"{addr} cools down")
        try:
            return self.inner.dial(addr)  # clean: handed to the caller
        except WorkerGone:
            self.bad_until[addr] = time.monotonic() + self.cool_s
            raise

    def dial_for_new(self, addr: tuple[str, int]) -> Wire:
        wire = self.inner.dial(addr)  # leak: raises for a draining worker after the wire is taken
        if addr in self.draining:
            raise WorkerGone(f"{addr} drains")
        return wire

    def hang_up(self, wire: Wire) -> None:
        if wire.broken:
            self.bad_until[wire.addr] = time.monotonic() + self.cool_s
        self.inner.hang_up(wire)


class Router:
    def __init__(self, pool: GuardedPool, workers: list[tuple[str, int]]) -> None:
        self.pool = pool
        self.workers = workers
        self.sticky: dict[str, Wire] = {}

    def ask(self, msg: dict, tries: int = 3) -> dict:
        last: Exception | None = None
        for _ in range(tries):
            addr = random.choice(self.workers)
            try:
                wire = self.pool.dial(addr)  # clean: hung up in the inner finally on every try
            except WorkerGone as e:
                last = e
                continue
            try:
                wire.send(msg)
                reply = wire.recv()
                if reply is not None:
                    return reply
                wire.broken = True
            except OSError as e:
                wire.broken = True
                last = e
            finally:
                self.pool.hang_up(wire)
        raise WorkerGone("no worker answered") from last

    def ask_any(self, msg: dict) -> dict | None:
        for addr in self.workers:
            wire = self.pool.dial(addr)  # leak: an empty reply goes on to the next worker without hang_up
            wire.send(msg)
            reply = wire.recv()
            if reply is None:
                wire.broken = True
                continue
            self.pool.hang_up(wire)
            return reply
        return None

    def generate(self, addr: tuple[str, int], msg: dict) -> Iterator[str]:
        wire = self.pool.dial(addr)  # clean: hung up in finally, also when the generator is closed
        finished = False
        try:
            wire.send(msg)
            while (part := wire.recv()) is not None:
                if part.get("done"):
                    finished = True
                    return
                yield part["text"]
        finally:
            wire.broken = not finished
            self.pool.hang_up(wire)

    def session(self, sid: str, addr: tuple[str, int]) -> Wire:
        wire = self.sticky.get(sid)
        if wire is not None and not wire.broken:
            return wire
        if wire is not None:
            self.pool.hang_up(self.sticky.pop(sid))
        wire = self.pool.dial(addr)  # clean: near miss, kept in self.sticky, which end_session() and the next call empty
        self.sticky[sid] = wire
        return wire

    def move_session(self, sid: str, addr: tuple[str, int]) -> None:
        self.sticky[sid] = self.pool.dial(addr)  # leak: the wire the session had is overwritten

    def end_session(self, sid: str) -> None:
        wire = self.sticky.pop(sid, None)
        if wire is not None:
            self.pool.hang_up(wire)
