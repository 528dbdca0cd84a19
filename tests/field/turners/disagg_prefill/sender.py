"""Prefill side: pushes finished KV pages to the decode worker."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from .pool import MetadataSlots, TransferBuffer, TransferPool

logger = logging.getLogger(__name__)
DoneCallback = Callable[[bool], None]


class TransportError(Exception):
    pass


class Transport:
    def __init__(self) -> None:
        self.posted: List[tuple] = []
        self.down = False

    def post(self, buf: TransferBuffer, peer: str, on_done: DoneCallback) -> None:
        if self.down:
            raise TransportError(peer)
        self.posted.append((buf, peer, on_done))

    def drain(self, ok: bool = True) -> int:
        done, self.posted = self.posted, []
        for _, _, on_done in done:
            on_done(ok)
        return len(done)


@dataclass
class PrefillJob:
    room: int
    peer: str
    nbytes: int
    aborted: bool = False
    row: int = -1


class KVSender:
    def __init__(self, pool: TransferPool, rows: MetadataSlots, transport: Transport) -> None:
        self.pool = pool
        self.rows = rows
        self.transport = transport
        self.in_flight: Dict[int, TransferBuffer] = {}

    def send(self, job: PrefillJob) -> bool:
        buf = self.pool.checkout()  # clean: near miss, the completion callback checks it in for either outcome
        if buf is None:
            return False
        buf.room = job.room

        def on_done(ok: bool) -> None:
            if not ok:
                logger.warning("transfer of room %d failed", job.room)
            self.pool.checkin(buf)

        self.transport.post(buf, job.peer, on_done)
        return True

    def send_tracked(self, job: PrefillJob) -> bool:
        if job.room in self.in_flight:
            return False
        buf = self.pool.checkout()  # leak: a failed transfer pops the entry and returns before checkin
        if buf is None:
            return False
        self.in_flight[job.room] = buf
        self.transport.post(buf, job.peer, lambda ok: self._complete(job.room, ok))
        return True

    def _complete(self, room: int, ok: bool) -> None:
        buf = self.in_flight.pop(room)
        if not ok:
            logger.error("room %d lost its peer", room)
            return
        self.pool.checkin(buf)

    def send_or_skip(self, job: PrefillJob) -> bool:
        buf = self.pool.checkout(timeout=0.01)  # clean: near miss, the handled post error checks it in, otherwise the callback does
        if buf is None:
            return False
        try:
            self.transport.post(buf, job.peer, lambda ok, b=buf: self.pool.checkin(b))
        except TransportError:
            self.pool.checkin(buf)
            return False
        return True

    def send_last(self, job: PrefillJob) -> bool:
        """The last chunk carries the metadata row as well."""
        row = self.rows.alloc_row(job.room)  # leak: no buffer means return without freeing the row
        if row < 0:
            return False
        buf = self.pool.checkout()  # clean: checked in by the callback along with the row
        if buf is None:
            return False

        def on_done(ok: bool) -> None:
            self.pool.checkin(buf)
            self.rows.free_row(job.room, row)

        self.transport.post(buf, job.peer, on_done)
        return True

    def send_batch(self, jobs: List[PrefillJob]) -> int:
        sent = 0
        for job in jobs:
            buf = self.pool.checkout()  # leak: an aborted job continues with the buffer in hand
            if buf is None:
                break
            if job.aborted:
                continue
            buf.room = job.room
            self.transport.post(buf, job.peer, lambda ok, b=buf: self.pool.checkin(b))
            sent += 1
        return sent
