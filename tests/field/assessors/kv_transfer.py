"""Prefill to decode KV transfer over registered memory."""
from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import torch


class Agent(Protocol):
    def register(self, addr: int, length: int) -> int: ...
    def deregister(self, handle: int) -> None: ...
    def post(self, op: str, local: int, remote: int, peer: str) -> int: ...
    def state(self, xfer: int) -> str: ...
    def release_xfer(self, xfer: int) -> None: ...


class LoopbackAgent:
    """In-process agent for tests and single node runs."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.regions: dict[int, tuple[int, int]] = {}
        self.xfers: dict[int, str] = {}

    def register(self, addr: int, length: int) -> int:
        h = next(self._ids)
        self.regions[h] = (addr, length)
        return h

    def deregister(self, handle: int) -> None:
        del self.regions[handle]

    def post(self, op: str, local: int, remote: int, peer: str) -> int:
        x = next(self._ids)
        self.xfers[x] = "DONE" if local in self.regions else "ERR"
        return x

    def state(self, xfer: int) -> str:
        return self.xfers[xfer]

    def release_xfer(self, xfer: int) -> None:
        del self.xfers[xfer]


@dataclass
class PendingRead:
    rid: str
    xfer: int
    handle: int


@dataclass
class Ticket:
    rid: str
    peer: str
    credits: int = 0
    xfers: list[int] = field(default_factory=list)


class Credits:
    def __init__(self, total: int) -> None:
        self._left = total
        self._lock = threading.Lock()

    def draw(self, n: int) -> bool:
        with self._lock:
            if n > self._left:
                return False
            self._left -= n
            return True

    def refund(self, n: int) -> None:
        with self._lock:
            self._left += n


class KVConnector:
    def __init__(self, agent: LoopbackAgent, credits: Credits) -> None:
        self.agent = agent
        self.credits = credits
        self._cache_handles: dict[str, int] = {}
        self._scale_handles: dict[str, int] = {}
        self._reads: list[PendingRead] = []
        self._tickets: dict[str, Ticket] = {}

    def register_caches(self, caches: dict[str, torch.Tensor]) -> None:
        for name, t in caches.items():
            if name in self._cache_handles:
                continue
            self._cache_handles[name] = self.agent.register(t.data_ptr(), t.nbytes)  # clean: shutdown deregisters all of _cache_handles

    def register_scales(self, scales: dict[str, torch.Tensor]) -> None:
        for name, t in scales.items():
            self._scale_handles[name] = self.agent.register(t.data_ptr(), t.nbytes)  # leak: shutdown clears _scale_handles without deregistering

    def start_read(self, rid: str, dst: torch.Tensor, remote: int, peer: str) -> bool:
        handle = self.agent.register(dst.data_ptr(), dst.nbytes)  # clean: near miss, deregistered upon an error, else by poll
        xfer = self.agent.post("READ", handle, remote, peer)  # leak: a transfer refused at once is not released
        if self.agent.state(xfer) == "ERR":
            self.agent.deregister(handle)
            return False
        self._reads.append(PendingRead(rid, xfer, handle))
        return True

    def poll(self) -> tuple[list[str], list[str]]:
        done: list[str] = []
        failed: list[str] = []
        still: list[PendingRead] = []
        for rd in self._reads:
            st = self.agent.state(rd.xfer)
            if st == "PROC":
                still.append(rd)
                continue
            self.agent.release_xfer(rd.xfer)
            self.agent.deregister(rd.handle)
            (done if st == "DONE" else failed).append(rd.rid)
        self._reads = still
        return done, failed

    def cancel(self, rid: str) -> None:
        for rd in [r for r in self._reads if r.rid == rid]:
            self.agent.release_xfer(rd.xfer)
            self.agent.deregister(rd.handle)
            self._reads.remove(rd)

    def open_ticket(self, rid: str, peer: str, blocks: int) -> Optional[Ticket]:
        if rid in self._tickets:
            return self._tickets[rid]
        if not self.credits.draw(blocks):  # clean: near miss, the ticket remembers the credits and close_ticket refunds them
            return None
        ticket = Ticket(rid, peer, blocks)
        self._tickets[rid] = ticket
        return ticket

    def grow_ticket(self, rid: str, blocks: int) -> bool:
        ticket = self._tickets.get(rid)
        if ticket is None:
            return False
        if not self.credits.draw(blocks):  # leak: the ticket counts one credit however many blocks were drawn
            return False
        ticket.credits += 1
        return True

    def push(self, rid: str, locals_: list[int], remotes: list[int]) -> int:
        ticket = self._tickets[rid]
        for lo, re in zip(locals_, remotes):
            ticket.xfers.append(self.agent.post("WRITE", lo, re, ticket.peer))  # clean: near miss, the ticket's transfers are released in close_ticket
        return len(ticket.xfers)

    def close_ticket(self, rid: str) -> None:
        ticket = self._tickets.pop(rid, None)
        if ticket is None:
            return
        for x in ticket.xfers:
            self.agent.release_xfer(x)
        self.credits.refund(ticket.credits)

    def send_now(self, src: torch.Tensor, remote: int, peer: str) -> bool:
        if not self.credits.draw(1):  # clean: near miss, refunded in the finally clause whatever the state is
            return False
        handle = self.agent.register(src.data_ptr(), src.nbytes)  # clean: deregistered in finally
        xfer = self.agent.post("WRITE", handle, remote, peer)  # clean: released in finally
        try:
            while self.agent.state(xfer) == "PROC":
                continue
            return self.agent.state(xfer) == "DONE"
        finally:
            self.agent.release_xfer(xfer)
            self.agent.deregister(handle)
            self.credits.refund(1)

    def probe_peer(self, peer: str, scratch: torch.Tensor) -> bool:
        handle = self.agent.register(scratch.data_ptr(), scratch.nbytes)  # leak: only the DONE state deregisters, a failed probe returns with the region
        xfer = self.agent.post("READ", handle, 0, peer)  # clean: released right after its state is read
        state = self.agent.state(xfer)
        self.agent.release_xfer(xfer)
        if state == "DONE":
            self.agent.deregister(handle)
            return True
        return False

    def shutdown(self) -> None:
        for rid in list(self._tickets):
            self.close_ticket(rid)
        for rd in self._reads:
            self.agent.release_xfer(rd.xfer)
            self.agent.deregister(rd.handle)
        self._reads.clear()
        for h in self._cache_handles.values():
            self.agent.deregister(h)
        self._cache_handles.clear()
        self._scale_handles.clear()
