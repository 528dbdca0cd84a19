"""Moves KV blocks between device and host."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .host_pool import HostPool, Slab, StreamPool

log = logging.getLogger(__name__)


@dataclass
class SwapTicket:
    request_id: str
    slabs: list[Slab] = field(default_factory=list)
    stream: object | None = None
    event: object | None = None


class Offloader:
    def __init__(self, device_kv, host: HostPool, streams: StreamPool):
        self.kv = device_kv
        self.host = host
        self.streams = streams
        self.swapped: dict[str, list[Slab]] = {}
        self.in_flight: dict[str, SwapTicket] = {}
        self.mirror: dict[str, Slab] = {}

    def swap_out(self, request_id: str, blocks: list[int]) -> bool:
        slabs = self.host.reserve_many(len(blocks))  # clean: kept in swapped, given back by swap_in or discard
        if len(slabs) < len(blocks):
            return False
        stream = self.streams.checkout()  # clean: checked in after the copies
        for block, slab in zip(blocks, slabs):
            self.kv.copy_out(block, slab.offset, stream)
        stream.synchronize()
        self.streams.checkin(stream)
        self.swapped.setdefault(request_id, []).extend(slabs)
        return True

    def swap_in(self, request_id: str, blocks: list[int]) -> bool:
        slabs = self.swapped.get(request_id)
        if slabs is None or len(slabs) != len(blocks):
            return False
        stream = self.streams.checkout()  # clean: checked in after the copies
        for block, slab in zip(blocks, slabs):
            self.kv.copy_in(slab.offset, block, stream)
        stream.synchronize()
        self.streams.checkin(stream)
        self.discard(request_id)
        return True

    def discard(self, request_id: str) -> None:
        for slab in self.swapped.pop(request_id, []):
            self.host.unreserve(slab)

    # ---- asynchronous variant -----------------------------------------------
    def start_swap_out(self, request_id: str, blocks: list[int]) -> bool:
        ticket = SwapTicket(request_id)
        for _ in blocks:
            slab = self.host.reserve()  # clean: near miss, kept in ticket.slabs, the shortage path drains them
            if slab is None:
                for got in ticket.slabs:
                    self.host.unreserve(got)
                return False
            ticket.slabs.append(slab)
        ticket.stream = self.streams.checkout()  # leak: finish_swap_out drops the ticket and never checks it in
        for block, slab in zip(blocks, ticket.slabs):
            self.kv.copy_out(block, slab.offset, ticket.stream)
        ticket.event = ticket.stream.record_event()
        self.in_flight[request_id] = ticket
        return True

    def finish_swap_out(self, request_id: str) -> bool:
        ticket = self.in_flight.get(request_id)
        if ticket is None or not ticket.event.query():
            return False
        del self.in_flight[request_id]
        self.swapped.setdefault(request_id, []).extend(ticket.slabs)
        return True

    # ---- mirrors ----------------------------------------------------------------
    def mirror_block(self, key: str, block: int) -> None:
        """Keep a host copy of a hot block so that eviction on the device is free."""
        slab = self.host.reserve()  # leak: a key mirrored before has its slab overwritten in the dict
        if slab is None:
            log.debug("no slab for mirror of %s", key)
            return
        stream = self.streams.checkout()  # clean: checked in at the end
        self.kv.copy_out(block, slab.offset, stream)
        stream.synchronize()
        self.mirror[key] = slab
        self.streams.checkin(stream)

    def unmirror(self, key: str) -> None:
        slab = self.mirror.pop(key, None)
        if slab is not None:
            self.host.unreserve(slab)

    def verify(self, request_id: str, blocks: list[int]) -> bool:
        """Compare the device blocks with what was swapped out."""
        slabs = self.swapped.get(request_id, [])
        stream = self.streams.checkout()  # leak: a mismatch returns without checkin
        for block, slab in zip(blocks, slabs):
            if self.kv.digest(block, stream) != self.kv.host_digest(slab.offset):
                log.warning("block %d of %s differs", block, request_id)
                return False
        self.streams.checkin(stream)
        return True
