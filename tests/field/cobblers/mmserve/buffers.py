"""Shared frame buffers between the preprocessing threads and the model process."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional


class FrameTicket:
    __slots__ = ("number", "mem", "label")

    def __init__(self, number: int, mem: bytearray) -> None:
        self.number = number
        self.mem = mem
        self.label = ""


class FrameBuffers:
    def __init__(self, count: int, nbytes: int) -> None:
        self._sem = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._stack: List[FrameTicket] = [FrameTicket(i, bytearray(nbytes)) for i in range(count)]
        self.nbytes = nbytes

    def claim(self, label: str, timeout: Optional[float] = None) -> Optional[FrameTicket]:
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, forgo() releases the permit with the ticket
            return None
        with self._lock:
            ticket = self._stack.pop()
        ticket.label = label
        return ticket

    def claim_if_small(self, label: str, nbytes: int) -> Optional[FrameTicket]:
        if not self._sem.acquire(blocking=False):  # leak: an oversized frame returns None with the permit taken
            return None
        if nbytes > self.nbytes:
            return None
        with self._lock:
            ticket = self._stack.pop()
        ticket.label = label
        return ticket

    def forgo(self, ticket: FrameTicket) -> None:
        ticket.label = ""
        with self._lock:
            self._stack.append(ticket)
        self._sem.release()
