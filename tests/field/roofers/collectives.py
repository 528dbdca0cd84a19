"""Asynchronous collectives with a bounded number of launches in flight."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Optional

log = logging.getLogger(__name__)


class Ticket:
    __slots__ = ("tag", "seq")

    def __init__(self, tag: str, seq: int) -> None:
        self.tag = tag
        self.seq = seq


class InflightWindow:
    """The proxy thread has room for a fixed number of launches."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._open: dict[int, Ticket] = {}
        self._seq = 0

    def engage(self, tag: str) -> Optional[Ticket]:
        if len(self._open) >= self.depth:
            return None
        self._seq += 1
        t = self._open[self._seq] = Ticket(tag, self._seq)
        return t

    def disengage(self, t: Ticket) -> None:
        del self._open[t.seq]

    def inflight(self) -> int:
        return len(self._open)


@dataclass
class Pending:
    ticket: Ticket
    buf: list[float]
    launched: bool = False


class Collectives:
    def __init__(self, window: InflightWindow, launch: Callable[[str, list[float]], None], world: int) -> None:
        self.window = window
        self.launch = launch
        self.world = world
        self._after: dict[int, tuple[Ticket, Callable[[], None]]] = {}

    def _begin(self, tag: str) -> Optional[Ticket]:
        for _ in range(3):
            t = self.window.engage(tag)  # clean: near miss, the loop goes on only when there was none
            if t is not None:
                return t
            self.progress()
        return None

    def _begin_reduce(self, op: str) -> Optional[Ticket]:
        return self._begin(f"reduce.{op}")  # clean: returned

    def progress(self) -> None:
        """Completes what has finished; runs the continuations."""
        for seq in list(self._after):
            t, fn = self._after.pop(seq)
            self.window.disengage(t)
            fn()

    def all_reduce_async(self, buf: list[float], op: str = "sum") -> Optional[Pending]:
        t = self._begin_reduce(op)  # clean: moved into the pending object
        if t is None:
            return None
        p = Pending(t, buf)
        if self.world > 1:
            self.launch(t.tag, buf)
            p.launched = True
        return p

    def wait(self, p: Pending) -> list[float]:
        self.window.disengage(p.ticket)
        return p.buf

    def all_reduce(self, buf: list[float]) -> list[float]:
        p = self.all_reduce_async(buf)  # clean: waited for when there is one
        if p is None:
            self.launch("reduce.sync", buf)
            return buf
        return self.wait(p)

    def all_reduce_mean(self, buf: list[float]) -> list[float]:
        p = self.all_reduce_async(buf)  # leak: with nothing launched (world of one) nobody waits
        if p is None:
            raise RuntimeError("collective window is full")
        if p.launched:
            self.wait(p)
        return [x / self.world for x in p.buf]

    def all_reduce_coalesced(self, bufs: list[list[float]]) -> bool:
        pend: list[Pending] = []
        for b in bufs:
            p = self.all_reduce_async(b)  # leak: a full window returns and abandons those before
            if p is None:
                return False
            pend.append(p)
        while pend:
            self.wait(pend.pop())
        return True

    def broadcast_then(self, buf: list[float], then: Callable[[], None]) -> bool:
        t = self._begin("bcast")  # clean: near miss, kept with its continuation, progress disengages
        if t is None:
            return False
        self.launch(t.tag, buf)
        self._after[t.seq] = (t, then)
        return True

    def barrier(self) -> bool:
        t = self._begin("barrier")  # leak: a launch that fails is logged and reported, the ticket stays
        if t is None:
            return False
        try:
            self.launch(t.tag, [])
        except OSError as e:
            log.error("barrier: %s", e)
            return False
        self.window.disengage(t)
        return True

    def probe(self) -> Optional[str]:
        t = self._begin("probe")  # clean: finally under the None check
        try:
            if t is None:
                return None
            self.launch(t.tag, [0.0])
            return t.tag
        except OSError:
            return None
        finally:
            if t is not None:
                self.window.disengage(t)
