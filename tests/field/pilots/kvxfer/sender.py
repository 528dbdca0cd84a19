from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from .arena import HostArena, Region, RegistrationTable

logger = logging.getLogger(__name__)


class Transport(Protocol):
    def write(self, region: Region, peer: str) -> int: ...

    def poll(self, handle: int) -> str: ...


@dataclass
class Outgoing:
    region: Region
    key: int
    handle: int
    retries: int = 0


class KVSender:
    def __init__(self, arena: HostArena, table: RegistrationTable, transport: Transport):
        self.arena = arena
        self.table = table
        self.transport = transport
        self._out: dict[str, Outgoing] = {}

    def send(self, request_id: str, peer: str) -> bool:
        if request_id in self._out:
            return False
        region = self.arena.carve()  # clean: near miss, a refused write restores it and progress() does later
        if region is None:
            return False
        key = self.table.register(region)  # leak: a refused write restores the region without deregistering
        try:
            handle = self.transport.write(region, peer)
        except ConnectionError:
            self.arena.restore(region)
            return False
        self._out[request_id] = Outgoing(region, key, handle)
        return True

    def _done(self, out: Outgoing) -> None:
        self.table.deregister(out.key)
        self.arena.restore(out.region)

    def progress(self) -> list[str]:
        finished: list[str] = []
        for rid, out in list(self._out.items()):
            state = self.transport.poll(out.handle)
            if state == "pending":
                continue
            self._done(self._out.pop(rid))
            if state == "done":
                finished.append(rid)
            else:
                logger.warning("send of %s ended as %s", rid, state)
        return finished

    def send_layers(self, peer: str, layers: int) -> int:
        regions = self.arena.carve_many(layers)  # clean: near miss, the loop restores each, the failed ones included
        sent = 0
        for region in regions:
            key = self.table.register(region)  # clean: near miss, deregistered in the finally of the same turn
            try:
                handle = self.transport.write(region, peer)
                while self.transport.poll(handle) == "pending":
                    pass
                sent += 1
            except ConnectionError:
                continue
            finally:
                self.table.deregister(key)
                self.arena.restore(region)
        return sent

    def ping(self, peer: str) -> bool:
        region = self.arena.carve()  # clean: near miss, both outcomes restore it
        if region is None:
            return False
        try:
            self.transport.write(region, peer)
        except ConnectionError:
            self.arena.restore(region)
            return False
        self.arena.restore(region)
        return True

    def abort(self, request_id: str) -> None:
        out = self._out.pop(request_id, None)
        if out is not None:
            self._done(out)
