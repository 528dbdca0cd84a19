from __future__ import annotations

import asyncio
from typing import Dict, List, Optional

from .conns import ConnPool, Worker
from .leases import Booking, SlotBook


class Router:
    def __init__(self, pool: ConnPool, book: SlotBook, prefill: List[Worker], decode: List[Worker]) -> None:
        self.pool = pool
        self.book = book
        self.prefill = prefill
        self.decode = decode
        self.bookings: Dict[str, Booking] = {}

    def _reserve(self) -> Optional[Booking]:
        """A booking on the first decode worker with room."""
        for worker in self.decode:
            booking = self.book.book(worker)  # clean: returned to the caller
            if booking is not None:
                return booking
        return None

    async def route(self, rid: str, prompt) -> Optional[dict]:
        booking = self._reserve()  # leak: not cancelled when the prefill worker answers with an error
        if booking is None:
            return None
        conn = await self.pool.checkout(self.prefill[hash(rid) % len(self.prefill)])  # clean: checked in by finally
        try:
            reply = await conn.call("prefill", {"rid": rid, "prompt": prompt, "to": booking.worker.addr})
        finally:
            self.pool.checkin(conn)
        if "error" in reply:
            return None
        self.bookings[rid] = booking
        return reply

    def finish(self, rid: str) -> None:
        booking = self.bookings.pop(rid, None)
        if booking is not None:
            booking.cancel()

    async def migrate(self, rid: str) -> bool:
        """Move a running request to another decode worker."""
        old = self.bookings[rid]
        booking = self._reserve()  # clean: near miss, cancelled or put in place of the cancelled old one
        if booking is None:
            return False
        if booking.worker == old.worker:
            booking.cancel()
            return False
        try:
            await self._tell(old.worker, rid, booking.worker.addr)
        except OSError:
            booking.cancel()
            return False
        if self.bookings.get(rid) is not old:
            booking.cancel()
            return False
        self.bookings[rid] = booking
        old.cancel()
        return True

    async def _tell(self, worker: Worker, rid: str, addr: str) -> None:
        conn = await self.pool.checkout(worker)  # clean: checked in by finally
        try:
            await conn.call("migrate", {"rid": rid, "to": addr})
        finally:
            self.pool.checkin(conn)

    async def broadcast(self, method: str, attempts: int = 2) -> int:
        """Call every decode worker, with retries; returns how many answered."""
        ok = 0
        for worker in self.decode:
            for _ in range(attempts):
                conn = await self.pool.checkout(worker)  # leak: a timeout retries with a new connection and forgets this one
                try:
                    await asyncio.wait_for(conn.call(method, None), 1.0)
                except asyncio.TimeoutError:
                    conn.broken = True
                    continue
                ok += 1
                self.pool.checkin(conn)
                break
        return ok
