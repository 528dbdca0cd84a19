"""Pairs prefill and decode workers and owns the bootstrap handshake."""
from __future__ import annotations

import random
from typing import Iterator, List, Optional, Tuple

from .pool import MetadataSlots, TransferBuffer, TransferPool
from .sender import Transport, TransportError


class Coordinator:
    def __init__(self, pool: TransferPool, rows: MetadataSlots, transport: Transport, peers: List[str]) -> None:
        self.pool = pool
        self.rows = rows
        self.transport = transport
        self.peers = peers

    def _pick(self) -> str:
        return random.choice(self.peers)

    def _buffer_for(self, room: int) -> Optional[TransferBuffer]:
        buf = self.pool.checkout(timeout=0.01)  # clean: tagged and handed to the caller
        if buf is not None:
            buf.room = room
        return buf

    def _claim(self, room: int) -> Optional[Tuple[TransferBuffer, int]]:
        buf = self._buffer_for(room)  # clean: near miss, checked in when no row is left, else returned in the pair
        if buf is None:
            return None
        row = self.rows.alloc_row(room)  # clean: returned in the pair
        if row == -1:
            self.pool.checkin(buf)
            return None
        return buf, row

    def handshake(self, room: int, attempts: int = 3) -> bool:
        for _ in range(attempts):
            buf = self._buffer_for(room)  # leak: every refused attempt goes round with a new buffer and drops the old
            if buf is None:
                return False
            try:
                self.transport.post(buf, self._pick(), lambda ok, b=buf: self.pool.checkin(b))
            except TransportError:
                continue
            return True
        return False

    def handshake_pinned(self, room: int, attempts: int = 3) -> bool:
        buf = self._buffer_for(room)  # clean: near miss, one buffer for all attempts, checked in after the loop
        if buf is None:
            return False
        for _ in range(attempts):
            try:
                self.transport.post(buf, self._pick(), lambda ok: self.pool.checkin(buf))
            except TransportError:
                continue
            return True
        self.pool.checkin(buf)
        return False

    def echo(self, room: int) -> Optional[int]:
        claim = self._claim(room)  # leak: the size mismatch frees the row alone
        if claim is None:
            return None
        buf, row = claim
        if buf.nbytes < 64:
            self.rows.free_row(room, row)
            return None
        size = buf.nbytes - row
        self.rows.free_row(room, row)
        self.pool.checkin(buf)
        return size

    def dry_run(self, rooms: List[int]) -> int:
        done = 0
        for room in rooms:
            claim = self._claim(room)  # clean: both halves given back in finally
            if claim is None:
                break
            buf, row = claim
            try:
                if buf.room != room:
                    continue
                done += 1
            finally:
                self.rows.free_row(room, row)
                self.pool.checkin(buf)
        return done

    def stripes(self, room: int, total: int) -> Iterator[TransferBuffer]:
        left = total
        while left > 0:
            buf = self._buffer_for(room)  # clean: near miss, finally runs also when the consumer stops early
            if buf is None:
                return
            try:
                left -= buf.nbytes
                yield buf
            finally:
                self.pool.checkin(buf)

    def first_stripe_size(self, room: int) -> int:
        for buf in self.stripes(room, 1 << 20):  # clean: near miss, the abandoned generator is closed and its finally runs
            return buf.nbytes
        return 0


def main() -> None:
    pool, rows, transport = TransferPool(2, 4096), MetadataSlots(2), Transport()
    coord = Coordinator(pool, rows, transport, ["decode-0"])
    assert coord.handshake(7) and transport.drain() == 1
    assert coord.dry_run([1, 2, 3]) == 3
    assert coord.first_stripe_size(9) == 4096
    assert coord.echo(4) is not None
    assert pool.idle() == 2


if __name__ == "__main__":
    main()
