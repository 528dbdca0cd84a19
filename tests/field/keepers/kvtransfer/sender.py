"""Prefill side: stages KV of finished prompts and pushes it to the decode node."""
from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional

from .memory import Region, RegionTable
from .transport import Handle, State, Transport

logger = logging.getLogger(__name__)


class PrefillSender:
    def __init__(self, table: RegionTable, transport: Transport) -> None:
        self.table = table
        self.transport = transport
        self.rooms: Dict[int, Dict[str, Any]] = {}

    def push(self, room: int, nbytes: int, peer: str) -> bool:
        region = self.table.register(nbytes)  # clean: near miss, deregistered without a handle, else held by the room
        if region is None:
            return False
        handle = self.transport.open(region, peer)  # clean: near miss, held by the room until advance or cancel closes it
        if handle is None:
            self.table.deregister(region)
            return False
        self.rooms[room] = {"region": region, "handle": handle}
        return True

    def advance(self) -> List[int]:
        done: List[int] = []
        for room, rec in list(self.rooms.items()):
            state = self.transport.poll(rec["handle"])
            if state is State.POSTED:
                continue
            if state is State.FAILED:
                logger.warning("room %d failed", room)
            else:
                done.append(room)
            self._drop(room)
        return done

    def _drop(self, room: int) -> None:
        rec = self.rooms.pop(room)
        self.transport.close(rec["handle"])
        self.table.deregister(rec["region"])

    def cancel(self, room: int) -> None:
        if room in self.rooms:
            self._drop(room)

    def push_sync(self, nbytes: int, peer: str, polls: int) -> bool:
        region = self.table.register(nbytes)  # clean: near miss, deregistered on both ways
        if region is None:
            return False
        handle = self.transport.open(region, peer)  # leak: a failed transfer returns without close
        if handle is None:
            self.table.deregister(region)
            return False
        for _ in range(polls):
            state = self.transport.poll(handle)
            if state is State.FAILED:
                self.table.deregister(region)
                return False
            if state is State.DONE:
                break
        self.transport.close(handle)
        self.table.deregister(region)
        return True

    def push_layers(self, sizes: List[int], peer: str) -> int:
        regions = self.table.register_layers(sizes)  # leak: the layers behind the one without a handle are never deregistered
        if regions is None:
            return 0
        sent = 0
        for region in regions:
            handle = self.transport.open(region, peer)  # clean: closed in each turn
            if handle is None:
                self.table.deregister(region)
                break
            sent += int(self.transport.poll(handle) is State.DONE)
            self.transport.close(handle)
            self.table.deregister(region)
        return sent
