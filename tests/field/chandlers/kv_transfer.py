"""Prefill to decode KV transfer: memory regions, tickets and notifications over RDMA."""
from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


class TransferError(Exception):
    pass


class Wire(Protocol):
    def put(self, peer: str, rkey: str, length: int) -> None: ...
    def done(self, ticket: str) -> bool: ...


@dataclass(frozen=True)
class Region:
    rkey: str
    addr: int
    length: int


class RegionRegistry:
    def __init__(self, max_regions: int) -> None:
        self._max = max_regions
        self._regions: dict[str, Region] = {}

    def register(self, addr: int, length: int) -> Region | None:
        if len(self._regions) >= self._max:
            return None
        region = Region(uuid.uuid4().hex, addr, length)
        self._regions[region.rkey] = region
        return region

    def deregister(self, region: Region) -> None:
        self._regions.pop(region.rkey, None)


class TicketOffice:
    def __init__(self, per_peer: int) -> None:
        self._per_peer = per_peer
        self._out: dict[str, set[str]] = {}

    def issue(self, peer: str) -> str | None:
        out = self._out.setdefault(peer, set())
        if len(out) >= self._per_peer:
            return None
        ticket = f"{peer}/{uuid.uuid4().hex[:8]}"
        out.add(ticket)
        return ticket

    def retire(self, ticket: str) -> None:
        self._out[ticket.rsplit("/", 1)[0]].discard(ticket)


@dataclass
class Outgoing:
    room: int
    ticket: str
    region: Region
    deadline: float


class KVSender:
    def __init__(self, wire: Wire, registry: RegionRegistry, office: TicketOffice, timeout: float = 5.0) -> None:
        self.wire = wire
        self.registry = registry
        self.office = office
        self.timeout = timeout
        self.outgoing: OrderedDict[int, Outgoing] = OrderedDict()
        self.aux: dict[int, Region] = {}

    def send(self, room: int, peer: str, addr: int, length: int) -> bool:
        region = self.registry.register(addr, length)  # leak: no ticket for the peer returns False with the region registered
        if region is None:
            return False
        ticket = self.office.issue(peer)  # leak: expire() deregisters the region of an overdue transfer, never retires its ticket
        if ticket is None:
            return False
        self.wire.put(peer, region.rkey, length)
        self.outgoing[room] = Outgoing(room, ticket, region, time.monotonic() + self.timeout)
        return True

    def poll(self) -> list[int]:
        finished = [o for o in self.outgoing.values() if self.wire.done(o.ticket)]
        for o in finished:
            del self.outgoing[o.room]
            self.registry.deregister(o.region)
            self.office.retire(o.ticket)
        return [o.room for o in finished]

    def expire(self) -> list[int]:
        now, rooms = time.monotonic(), []
        while self.outgoing:
            room, o = next(iter(self.outgoing.items()))
            if o.deadline > now:
                break
            self.outgoing.popitem(last=False)
            self.registry.deregister(o.region)
            rooms.append(room)
        return rooms

    def send_aux(self, room: int, addr: int, length: int) -> bool:
        if room in self.aux:
            return True
        region = self.registry.register(addr, length)  # clean: near miss, once per room, drop_aux deregisters it
        if region is None:
            return False
        self.aux[room] = region
        return True

    def drop_aux(self, room: int) -> None:
        region = self.aux.pop(room, None)
        if region is not None:
            self.registry.deregister(region)

    def refresh_aux(self, room: int, addr: int, length: int) -> bool:
        region = self.registry.register(addr, length)  # clean: near miss, the room's old region is dropped before
        if region is None:
            return False
        self.drop_aux(room)
        self.aux[room] = region
        return True

    def extend_aux(self, room: int, addr: int, length: int) -> Region | None:
        region = self.registry.register(addr, length)  # leak: setdefault keeps the older region and this one is lost
        if region is None:
            return None
        return self.aux.setdefault(room, region)

    def push_layers(self, peer: str, layers: list[tuple[int, int]]) -> int:
        sent = 0
        for addr, length in layers:
            region = self.registry.register(addr, length)  # clean: near miss, deregistered in finally for break too
            if region is None:
                break
            try:
                self.wire.put(peer, region.rkey, length)
                sent += 1
            except TransferError:
                break
            finally:
                self.registry.deregister(region)
        return sent

    def push_with_retry(self, peer: str, region: Region, tries: int = 3) -> bool:
        for _ in range(tries):
            ticket = self.office.issue(peer)  # leak: a failed try goes round with its ticket unretired
            if ticket is None:
                time.sleep(0.01)
                continue
            try:
                self.wire.put(peer, region.rkey, region.length)
            except TransferError:
                continue
            self.office.retire(ticket)
            return True
        return False

    def push_once(self, peer: str, region: Region) -> bool:
        ticket = self.office.issue(peer)  # clean: near miss, retired in the handler and after success
        if ticket is None:
            return False
        try:
            self.wire.put(peer, region.rkey, region.length)
        except TransferError:
            self.office.retire(ticket)
            return False
        self.office.retire(ticket)
        return True

    def wait_slot(self, peer: str, budget: float) -> str | None:
        end = time.monotonic() + budget
        while time.monotonic() < end:
            ticket = self.office.issue(peer)  # clean: handed to the caller
            if ticket is not None:
                return ticket
            time.sleep(0.001)
        return None

    def barrier(self, peers: list[str], budget: float) -> bool:
        got: list[str] = []
        for peer in peers:
            ticket = self.wait_slot(peer, budget)  # clean: near miss, all got so far are retired after the loop, complete or not
            if ticket is None:
                break
            got.append(ticket)
        complete = len(got) == len(peers)
        for ticket in got:
            self.office.retire(ticket)
        return complete

    def reachable(self, peer: str, budget: float) -> bool:
        return self.wait_slot(peer, budget) is not None  # leak: the ticket is only compared with None
