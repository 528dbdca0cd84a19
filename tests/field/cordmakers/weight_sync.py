"""Trainer to inference weight synchronisation.

The trainer gathers parameters into transfer buffers and broadcasts them to the
generation ranks.  A wrapper keeps a permit per receiver so that a slow one does
not pile up buffers.
"""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, LifoQueue
from typing import Callable, Iterable, Optional

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class TransferBuffers:
    """The raw pool."""

    def __init__(self, count: int, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self._q: LifoQueue = LifoQueue()
        for _ in range(count):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8, device=device))

    def hand_out(self, timeout: float = 30.0) -> Optional[torch.Tensor]:
        try:
            return self._q.get(timeout=timeout)  # clean: returned to the caller
        except Empty:
            return None

    def hand_in(self, buf: torch.Tensor) -> None:
        self._q.put(buf)


class Ticket:
    """A buffer plus the permit of its receiver."""

    __slots__ = ("buf", "receiver", "used")

    def __init__(self, buf: torch.Tensor, receiver: int):
        self.buf = buf
        self.receiver = receiver
        self.used = 0

    def room(self) -> int:
        return self.buf.numel() - self.used

    def append(self, raw: torch.Tensor) -> None:
        self.buf[self.used:self.used + raw.numel()].copy_(raw)
        self.used += raw.numel()


class ReceiverWindow:
    """Wraps TransferBuffers: at most `window` buffers per receiver."""

    def __init__(self, buffers: TransferBuffers, receivers: Iterable[int], window: int = 2):
        self.buffers = buffers
        self.permits = {r: threading.Semaphore(window) for r in receivers}

    def ticket(self, receiver: int) -> Optional[Ticket]:
        if not self.permits[receiver].acquire(timeout=30.0):  # clean: near miss, released when there is no buffer, else by punch()
            return None
        buf = self.buffers.hand_out()  # clean: moved into the ticket, handed in by punch()
        if buf is None:
            self.permits[receiver].release()
            return None
        return Ticket(buf, receiver)

    def ticket_nowait(self, receiver: int) -> Optional[Ticket]:
        buf = self.buffers.hand_out(timeout=0.001)  # leak: not handed in when the receiver has no permit left
        if buf is None:
            return None
        if not self.permits[receiver].acquire(blocking=False):  # clean: near miss, released by punch() with the ticket
            return None
        return Ticket(buf, receiver)

    def punch(self, ticket: Ticket) -> None:
        self.buffers.hand_in(ticket.buf)
        self.permits[ticket.receiver].release()


class TracedWindow:
    """Wraps ReceiverWindow and counts; same contract."""

    def __init__(self, inner: ReceiverWindow):
        self.inner = inner
        self.open = 0
        self.denied = 0

    def ticket(self, receiver: int) -> Optional[Ticket]:
        t = self.inner.ticket(receiver)  # clean: returned to the caller
        if t is None:
            self.denied += 1
            return None
        self.open += 1
        return t

    def ticket_for(self, receiver: int, nbytes: int) -> Optional[Ticket]:
        t = self.inner.ticket(receiver)  # leak: dropped when the buffer is too small for the tensor
        if t is None or t.room() < nbytes:
            self.denied += 1
            return None
        self.open += 1
        return t

    def punch(self, ticket: Ticket) -> None:
        self.open -= 1
        self.inner.punch(ticket)


class WeightSync:
    def __init__(self, window: TracedWindow, group, version: int = 0):
        self.window = window
        self.group = group
        self.version = version
        self.exec = ThreadPoolExecutor(max_workers=4)
        self.partial: dict[int, Ticket] = {}
        self.failed: list[str] = []

    def _bytes(self, p: torch.Tensor) -> torch.Tensor:
        return p.detach().reshape(-1).view(torch.uint8)

    def send_params(self, params: dict[str, torch.Tensor], receiver: int) -> int:
        sent = 0
        for name, p in params.items():
            raw = self._bytes(p)
            t = self.window.ticket_for(receiver, raw.numel())  # clean: punched after the send, None-checked
            if t is None:
                self.failed.append(name)
                continue
            t.append(raw)
            dist.send(t.buf[:t.used], dst=receiver, group=self.group)
            self.window.punch(t)
            sent += 1
        return sent

    def fill(self, params: dict[str, torch.Tensor], receiver: int) -> None:
        """Pack several parameters into one ticket; flush() sends the rest."""
        for p in params.values():
            raw = self._bytes(p)
            t = self.partial.get(receiver)
            if t is not None and t.room() < raw.numel():
                self._send(self.partial.pop(receiver))
                t = None
            if t is None:
                t = self.window.ticket(receiver)  # clean: near miss, kept in self.partial, sent and punched by _send()
                if t is None:
                    raise TimeoutError(f"receiver {receiver}")
                self.partial[receiver] = t
            t.append(raw)

    def _send(self, t: Ticket) -> None:
        try:
            dist.send(t.buf[:t.used], dst=t.receiver, group=self.group)
        finally:
            self.window.punch(t)

    def flush(self) -> None:
        while self.partial:
            _, t = self.partial.popitem()
            self._send(t)

    def send_async(self, name: str, p: torch.Tensor, receiver: int) -> Optional[Future]:
        raw = self._bytes(p)
        t = self.window.ticket_for(receiver, raw.numel())  # clean: near miss, the submitted _send() punches it
        if t is None:
            return None
        t.append(raw)
        return self.exec.submit(self._send, t)

    def send_delta(self, name: str, p: torch.Tensor, base: torch.Tensor, receiver: int) -> Optional[Future]:
        t = self.window.ticket(receiver)  # leak: an unchanged parameter returns without punch()
        if t is None:
            return None
        delta = p - base
        if not delta.any():
            log.debug("%s unchanged", name)
            return None
        t.append(self._bytes(delta))
        return self.exec.submit(self._send, t)

    def probe(self, receivers: list[int], alive: Callable[[int], bool]) -> list[int]:
        good = []
        for r in receivers:
            t = self.window.inner.ticket_nowait(r)  # leak: dead receivers are skipped with their ticket
            if t is None:
                continue
            if not alive(r):
                log.warning("receiver %d is dead", r)
                continue
            good.append(r)
            self.window.inner.punch(t)
        return good

    def mirror(self, p: torch.Tensor, a: int, b: int) -> bool:
        """Send the same parameter to two receivers, or to neither."""
        first = self.window.ticket(a)  # leak: not punched when there is no ticket for b
        if first is None:
            return False
        second = self.window.ticket(b)  # clean: sent and punched by _send(), None-checked
        if second is None:
            return False
        raw = self._bytes(p)
        for t in (first, second):
            t.append(raw[:t.room()])
            self._send(t)
        return True
