"""Prefill side: stages KV pages in the ring and sends them."""
from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from .ring import HandleTable, RegisteredRing, Segment

log = logging.getLogger(__name__)


@dataclass
class Outgoing:
    rid: str
    seg: Segment
    handle: int
    layer: int = 0


class Sender:
    def __init__(self, ring: RegisteredRing, handles: HandleTable, nic):
        self.ring = ring
        self.handles = handles
        self.nic = nic
        self.pending: dict[str, Outgoing] = {}
        self.queued: list[Segment] = []
        self.probes: dict[str, int] = {}
        self.wire = threading.Lock()

    def send(self, rid: str, payload: bytes) -> bool:
        if rid in self.pending:
            return False
        seg = self.ring.carve(len(payload))  # clean: in pending, on_ack and cancel retire it
        if seg is None:
            return False
        handle = self.handles.open_handle()  # clean: in pending, on_ack and cancel close it
        if not handle:
            self.ring.retire(seg)
            return False
        self.nic.write(seg.start, payload)
        self.pending[rid] = Outgoing(rid, seg, handle)
        self.nic.post(handle, seg.start, seg.size)
        return True

    def send_pair(self, rid: str, keys: bytes, values: bytes) -> bool:
        """K and V in segments of their own."""
        k = self.ring.carve(len(keys))  # leak: not retired when there is no room for the values
        if k is None:
            return False
        v = self.ring.carve(len(values))  # clean: retired together with k
        if v is None:
            log.info("no room for the values of %s", rid)
            return False
        handle = self.handles.open_handle()  # clean: closed after both posts
        if not handle:
            self.ring.retire(k)
            self.ring.retire(v)
            return False
        self.nic.write(k.start, keys)
        self.nic.write(v.start, values)
        self.nic.post_wait(handle, k.start, k.size)
        self.nic.post_wait(handle, v.start, v.size)
        self.handles.close_handle(handle)
        self.ring.retire(k)
        self.ring.retire(v)
        return True

    def on_ack(self, rid: str) -> None:
        out = self.pending.pop(rid, None)
        if out is None:
            return
        self.handles.close_handle(out.handle)
        self.ring.retire(out.seg)

    def cancel(self, rid: str) -> None:
        out = self.pending.get(rid)
        if out is not None:
            self.nic.abort(out.handle)
            self.on_ack(rid)

    def enqueue(self, payload: bytes) -> bool:
        seg = self.ring.carve(len(payload))  # clean: near miss, flush retires all that is queued
        if seg is None:
            return False
        self.nic.write(seg.start, payload)
        self.queued.append(seg)
        return True

    def flush(self) -> int:
        handle = self.handles.open_handle()  # leak: with nothing queued 0 is returned with the handle open
        if not handle:
            return 0
        if not self.queued:
            return 0
        sent = 0
        while self.queued:
            seg = self.queued.pop()
            self.nic.post_wait(handle, seg.start, seg.size)
            self.ring.retire(seg)
            sent += seg.size
        self.handles.close_handle(handle)
        return sent

    def probe(self, peer: str) -> bool:
        """One probe handle for each peer, until forget_peer."""
        if peer not in self.probes:
            handle = self.handles.open_handle()  # leak: forget_peer pops the handle and does not close it
            if not handle:
                return False
            self.probes[peer] = handle
        return self.nic.ping(self.probes[peer], peer)

    def forget_peer(self, peer: str) -> None:
        handle = self.probes.pop(peer, None)
        if handle is not None:
            log.info("peer %s forgotten", peer)

    def write_header(self, rid: str, header: bytes) -> bool:
        if not self.wire.acquire(timeout=1.0):  # leak: a closed link returns with the lock held
            return False
        if not self.nic.link_up():
            log.warning("link down, header of %s not sent", rid)
            return False
        self.nic.inline(header)
        self.wire.release()
        return True
