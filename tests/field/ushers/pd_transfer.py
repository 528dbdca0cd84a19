"""Prefill to decode KV transfer: registered memory, transfer tickets and a state machine."""
from __future__ import annotations

import enum
import itertools
import logging
from dataclasses import dataclass, field
from typing import Callable, Optional

logger = logging.getLogger(__name__)


class XferState(enum.Enum):
    INIT = "init"
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"


class TransportError(RuntimeError):
    pass


@dataclass(frozen=True)
class MemHandle:
    key: int
    addr: int
    length: int


@dataclass
class Ticket:
    tid: int
    peer: str
    state: XferState = XferState.INIT


class MemoryRegistry:
    def __init__(self, nic, limit: int = 1024) -> None:
        self._nic = nic
        self._limit = limit
        self._live: dict[int, MemHandle] = {}
        self._keys = itertools.count(1)

    def register(self, addr: int, length: int) -> Optional[MemHandle]:
        if len(self._live) >= self._limit:
            return None
        handle = MemHandle(next(self._keys), addr, length)
        self._nic.reg_mr(handle.key, addr, length)
        self._live[handle.key] = handle
        return handle

    def deregister(self, handle: MemHandle) -> None:
        if self._live.pop(handle.key, None) is not None:
            self._nic.dereg_mr(handle.key)


class TicketBook:
    def __init__(self, per_peer: int) -> None:
        self._per_peer = per_peer
        self._open: dict[str, int] = {}
        self._ids = itertools.count()

    def issue(self, peer: str) -> Optional[Ticket]:
        if self._open.get(peer, 0) >= self._per_peer:
            return None
        self._open[peer] = self._open.get(peer, 0) + 1
        return Ticket(next(self._ids), peer)

    def retire(self, ticket: Ticket) -> None:
        self._open[ticket.peer] -= 1


@dataclass
class Transfer:
    req_id: str
    peer: str
    ticket: Ticket
    local: MemHandle
    extra: Optional[MemHandle] = None
    on_done: Optional[Callable[[str], None]] = None


@dataclass
class SendQueue:
    items: list[Transfer] = field(default_factory=list)


class PrefillSender:
    def __init__(self, registry: MemoryRegistry, tickets: TicketBook, transport) -> None:
        self.registry = registry
        self.tickets = tickets
        self.transport = transport
        self.inflight: dict[str, Transfer] = {}
        self.queue = SendQueue()
        self._arena: Optional[MemHandle] = None

    def start(self, addr: int, length: int) -> bool:
        if self._arena is not None:
            return True
        self._arena = self.registry.register(addr, length)  # clean: near miss, guarded by None and dropped by stop
        return self._arena is not None

    def stop(self) -> None:
        for req_id in list(self.inflight):
            self.cancel(req_id)
        for xfer in self.queue.items:
            self._settle(xfer)
        self.queue.items.clear()
        if self._arena is not None:
            self.registry.deregister(self._arena)
            self._arena = None

    def resize_arena(self, addr: int, length: int) -> bool:
        grown = self.registry.register(addr, length)  # clean: near miss, takes the place of the one deregistered
        if grown is None:
            return False
        if self._arena is not None:
            self.registry.deregister(self._arena)
        self._arena = grown
        return True

    def submit(self, req_id: str, peer: str, addr: int, length: int) -> bool:
        handle = self.registry.register(addr, length)  # clean: near miss, deregistered where no ticket is had, else settled
        if handle is None:
            return False
        ticket = self.tickets.issue(peer)  # leak: a failed post keeps the ticket
        if ticket is None:
            self.registry.deregister(handle)
            return False
        try:
            self.transport.post(ticket.tid, handle.key, peer)
        except TransportError:
            logger.warning("post to %s failed", peer)
            self.registry.deregister(handle)
            return False
        ticket.state = XferState.POSTED
        self.inflight[req_id] = Transfer(req_id, peer, ticket, handle)
        return True

    def enqueue(self, req_id: str, peer: str, addr: int, length: int) -> bool:
        ticket = self.tickets.issue(peer)  # leak: not retired when memory cannot be registered
        if ticket is None:
            return False
        handle = self.registry.register(addr, length)  # clean: in the queue, settled by flush or stop
        if handle is None:
            return False
        self.queue.items.append(Transfer(req_id, peer, ticket, handle))
        return True

    def flush(self) -> int:
        sent = 0
        pending, self.queue.items = self.queue.items, []
        for xfer in pending:
            try:
                self.transport.post(xfer.ticket.tid, xfer.local.key, xfer.peer)
            except TransportError:
                self._settle(xfer)
                continue
            xfer.ticket.state = XferState.POSTED
            self.inflight[xfer.req_id] = xfer
            sent += 1
        return sent

    def attach_metadata(self, req_id: str, addr: int, length: int) -> bool:
        xfer = self.inflight.get(req_id)
        if xfer is None or xfer.extra is not None:
            return False
        xfer.extra = self.registry.register(addr, length)  # leak: _settle knows only the local handle
        return xfer.extra is not None

    def poll(self) -> list[str]:
        finished: list[str] = []
        for req_id, xfer in list(self.inflight.items()):
            state = self.transport.state(xfer.ticket.tid)
            if state is XferState.POSTED:
                continue
            del self.inflight[req_id]
            xfer.ticket.state = state
            self._settle(xfer)
            if state is XferState.DONE:
                finished.append(req_id)
                if xfer.on_done is not None:
                    xfer.on_done(req_id)
        return finished

    def cancel(self, req_id: str) -> None:
        xfer = self.inflight.pop(req_id, None)
        if xfer is None:
            return
        self.transport.cancel(xfer.ticket.tid)
        self._settle(xfer)

    def _settle(self, xfer: Transfer) -> None:
        self.registry.deregister(xfer.local)
        self.tickets.retire(xfer.ticket)

    def push_sync(self, peer: str, addr: int, length: int) -> bool:
        handle = self.registry.register(addr, length)  # clean: finally
        if handle is None:
            return False
        try:
            ticket = self.tickets.issue(peer)  # clean: near miss, retired whichever way the wait ends
            if ticket is None:
                return False
            ok = self._push_and_wait(ticket, handle)
            self.tickets.retire(ticket)
            return ok
        finally:
            self.registry.deregister(handle)

    def _push_and_wait(self, ticket: Ticket, handle: MemHandle) -> bool:
        try:
            self.transport.post(ticket.tid, handle.key, ticket.peer)
            return self.transport.wait(ticket.tid) is XferState.DONE
        except TransportError:
            return False

    def broadcast(self, peers: list[str], addr: int, length: int) -> int:
        handle = self.registry.register(addr, length)  # leak: returns without deregister when no peer has a ticket
        if handle is None:
            return 0
        tickets = [t for p in peers if (t := self.tickets.issue(p)) is not None]  # clean: each is retired after its push
        if not tickets:
            return 0
        ok = 0
        for ticket in tickets:
            ok += self._push_and_wait(ticket, handle)
            self.tickets.retire(ticket)
        self.registry.deregister(handle)
        return ok
