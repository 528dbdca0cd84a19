from __future__ import annotations

import asyncio
import logging
from typing import Awaitable, Callable

from .leases import Lease, LeaseBook
from .staging import BouncePool

logger = logging.getLogger(__name__)

Send = Callable[[bytes], Awaitable[None]]


class RelayClient:
    def __init__(self, book: LeaseBook, pool: BouncePool, send: Send) -> None:
        self.book = book
        self.pool = pool
        self.send = send
        self.held: dict[str, list[Lease]] = {}

    def lookup(self, rid: str, keys: list[str], min_hits: int = 1) -> int:
        run = self.book.grant_prefix(keys)  # leak: a run below min_hits returns 0 without revoking what it has
        if len(run) < min_hits:
            return 0
        self.held.setdefault(rid, []).extend(run)
        return len(run)

    def count_hits(self, keys: list[str]) -> int:
        run = self.book.grant_prefix(keys)  # clean: near miss, every lease is revoked before the count is returned
        for lease in run:
            self.book.revoke(lease)
        return len(run)

    async def retrieve(self, rid: str) -> int:
        sent = 0
        for lease in self.held.pop(rid, []):
            buf = await self.pool.claim_within(0.5)  # leak: an object larger than the buffer continues without unclaim
            if buf is None:
                self.book.revoke(lease)
                continue
            if not buf.load(self.book.read(lease)):
                logger.warning("%s is larger than a bounce buffer", lease.key)
                self.book.revoke(lease)
                continue
            await self.send(bytes(buf.mem[:buf.filled]))
            self.pool.unclaim(buf)
            self.book.revoke(lease)
            sent += 1
        return sent

    def finish(self, rid: str) -> None:
        for lease in self.held.pop(rid, []):
            self.book.revoke(lease)

    async def fetch_one(self, key: str) -> bool:
        lease = self.book.grant(key)  # clean: near miss, revoked in finally also when cancelled
        if lease is None:
            return False
        try:
            buf = await self.pool.claim()  # clean: unclaimed in the inner finally
            try:
                if not buf.load(self.book.read(lease)):
                    return False
                await self.send(bytes(buf.mem[:buf.filled]))
            except asyncio.CancelledError:
                logger.debug("fetch of %s cancelled", key)
                raise
            finally:
                self.pool.unclaim(buf)
            return True
        finally:
            self.book.revoke(lease)
