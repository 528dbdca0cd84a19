from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

log = logging.getLogger(__name__)


class Agent(Protocol):
    def post_write(self, local: int, remote: int, nbytes: int) -> int: ...
    def poll(self, xfer: int) -> str: ...


@dataclass(frozen=True)
class Registration:
    key: int
    addr: int
    nbytes: int


class MemoryRegistrar:
    def __init__(self) -> None:
        self._live: dict[int, Registration] = {}
        self._next = 1
        self._lock = threading.Lock()

    def register(self, t: torch.Tensor) -> Registration:
        with self._lock:
            reg = Registration(self._next, t.data_ptr(), t.numel() * t.element_size())
            self._live[reg.key] = reg
            self._next += 1
        return reg

    def deregister(self, reg: Registration) -> None:
        with self._lock:
            self._live.pop(reg.key, None)


class TicketBook:
    """Bounds the number of transfers in flight per peer."""

    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self._out: dict[str, int] = {}

    def issue(self, peer: str) -> bool:
        if self._out.get(peer, 0) >= self.per_peer:
            return False
        self._out[peer] = self._out.get(peer, 0) + 1
        return True

    def settle(self, peer: str) -> None:
        self._out[peer] -= 1


@dataclass
class Transfer:
    xfer: int
    peer: str
    reg: Registration
    started: float = field(default_factory=time.monotonic)


class KVSender:
    def __init__(self, agent: Agent, registrar: MemoryRegistrar, tickets: TicketBook, timeout: float = 30.0) -> None:
        self.agent = agent
        self.registrar = registrar
        self.tickets = tickets
        self.timeout = timeout
        self.inflight: dict[int, Transfer] = {}
        self.remote: dict[str, int] = {}
        self._probe: Registration | None = None

    def send(self, peer: str, kv: torch.Tensor) -> int | None:
        if not self.tickets.issue(peer):  # leak: an unknown peer returns below without settling
            return None
        addr = self.remote.get(peer)
        if addr is None:
            log.error("no remote buffer for %s", peer)
            return None
        reg = self.registrar.register(kv)  # clean: near miss, deregistered on a refused post, else moved to inflight
        try:
            xfer = self.agent.post_write(reg.addr, addr, reg.nbytes)
        except ConnectionError:
            self.registrar.deregister(reg)
            self.tickets.settle(peer)
            return None
        self.inflight[xfer] = Transfer(xfer, peer, reg)
        return xfer

    def send_layers(self, peer: str, layers: list[torch.Tensor]) -> bool:
        addr = self.remote[peer]
        if not self.tickets.issue(peer):  # clean: near miss, settled in the finally
            return False
        regs: list[Registration] = []
        try:
            for layer in layers:
                reg = self.registrar.register(layer)  # clean: near miss, the finally runs over regs on the early return too
                regs.append(reg)
                xfer = self.agent.post_write(reg.addr, addr, reg.nbytes)
                if self.agent.poll(xfer) == "failed":
                    return False
                addr += reg.nbytes
            return True
        finally:
            for reg in regs:
                self.registrar.deregister(reg)
            self.tickets.settle(peer)

    def _close(self, tr: Transfer) -> None:
        self.registrar.deregister(tr.reg)
        self.tickets.settle(tr.peer)

    def progress(self) -> list[int]:
        done: list[int] = []
        for xfer, tr in list(self.inflight.items()):
            status = self.agent.poll(xfer)
            if status == "pending":
                if time.monotonic() - tr.started <= self.timeout:
                    continue
                log.warning("transfer %d to %s timed out", xfer, tr.peer)
            del self.inflight[xfer]
            self._close(tr)
            if status == "done":
                done.append(xfer)
        return done

    def cancel_peer(self, peer: str) -> int:
        gone = [x for x, tr in self.inflight.items() if tr.peer == peer]
        for xfer in gone:
            self._close(self.inflight.pop(xfer))
        return len(gone)

    def probe(self, scratch: torch.Tensor) -> None:
        self._probe = self.registrar.register(scratch)  # leak: a second probe overwrites the registration of the first

    def close(self) -> None:
        for tr in self.inflight.values():
            self._close(tr)
        self.inflight.clear()
        if self._probe is not None:
            self.registrar.deregister(self._probe)
            self._probe = None


class KVReceiver:
    def __init__(self, registrar: MemoryRegistrar, slots: int, slot_shape: tuple[int, ...]) -> None:
        self.registrar = registrar
        self._free = [torch.empty(slot_shape, dtype=torch.bfloat16, device="cuda") for _ in range(slots)]
        self.expected: dict[str, tuple[torch.Tensor, Registration]] = {}

    def take_slot(self) -> torch.Tensor | None:
        return self._free.pop() if self._free else None

    def put_slot(self, t: torch.Tensor) -> None:
        self._free.append(t)

    def expect(self, rid: str) -> Registration | None:
        if rid in self.expected:
            return self.expected[rid][1]
        slot = self.take_slot()  # clean: near miss, kept in expected; both land and forget put it back
        if slot is None:
            return None
        reg = self.registrar.register(slot)  # leak: forget puts back the slot and leaves the registration
        self.expected[rid] = (slot, reg)
        return reg

    def land(self, rid: str, dst: torch.Tensor) -> bool:
        entry = self.expected.pop(rid, None)
        if entry is None:
            return False
        slot, reg = entry
        dst.copy_(slot)
        self.registrar.deregister(reg)
        self.put_slot(slot)
        return True

    def forget(self, rid: str) -> None:
        entry = self.expected.pop(rid, None)
        if entry is not None:
            self.put_slot(entry[0])

    def loopback(self, src: torch.Tensor) -> float | None:
        slot = self.take_slot()  # clean: near miss, put back on the shape mismatch too
        if slot is None:
            return None
        if slot.shape != src.shape:
            self.put_slot(slot)
            return None
        t0 = time.perf_counter()
        slot.copy_(src)
        torch.cuda.synchronize()
        self.put_slot(slot)
        return time.perf_counter() - t0

    def stage(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        staged: list[torch.Tensor] = []
        for src in sources:
            slot = self.take_slot()  # leak: the staged copies are returned as clones and the slots never put back
            if slot is None:
                break
            slot.copy_(src)
            staged.append(slot.clone())
        return staged
