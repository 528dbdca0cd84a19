from __future__ import annotations

import asyncio
from collections import defaultdict

from .leases import Lease, LeaseBook
from .staging import BounceBuffer, BouncePool


class RelayServer:
    def __init__(self, book: LeaseBook, pool: BouncePool) -> None:
        self.book = book
        self.pool = pool
        self.outbox: asyncio.Queue[tuple[str, BounceBuffer]] = asyncio.Queue()
        self.watch: dict[str, Lease] = {}
        self.stats: dict[str, int] = defaultdict(int)

    async def enqueue(self, peer: str, key: str) -> bool:
        lease = self.book.grant(key)  # clean: near miss, revoked once the bytes lie in the buffer, or when none comes free
        if lease is None:
            return False
        buf = await self.pool.claim_within(1.0)  # leak: the writer unclaims only for peers it knows, the others' buffers are dropped
        if buf is None:
            self.book.revoke(lease)
            return False
        buf.load(self.book.read(lease))
        self.book.revoke(lease)
        await self.outbox.put((peer, buf))
        return True

    async def writer(self, peers: dict[str, asyncio.StreamWriter]) -> None:
        while True:
            peer, buf = await self.outbox.get()
            out = peers.get(peer)
            if out is None:
                self.stats["unknown_peer"] += 1
                continue
            out.write(buf.mem[:buf.filled])
            await out.drain()
            self.pool.unclaim(buf)

    def pin_hot(self, key: str) -> bool:
        if key in self.watch:
            return True
        lease = self.book.grant(key)  # clean: near miss, kept in watch, cool revokes it
        if lease is None:
            return False
        self.watch[key] = lease
        return True

    def cool(self, key: str) -> None:
        lease = self.watch.pop(key, None)
        if lease is not None:
            self.book.revoke(lease)

    def rename_hot(self, old: str, new: str) -> bool:
        lease = self.book.grant(new)  # leak: when new is watched already its older lease is overwritten
        if lease is None:
            return False
        self.cool(old)
        self.watch[new] = lease
        return True
