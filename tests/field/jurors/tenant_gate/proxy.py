"""Charges tenants, forwards their calls and settles."""
from __future__ import annotations

import asyncio
from collections import deque

from .quota import Charge, QuotaBook
from .upstream import ChannelError, ChannelPool


class Proxy:
    def __init__(self, book: QuotaBook, channels: ChannelPool) -> None:
        self.book = book
        self.channels = channels
        self.batch: deque[tuple[Charge, dict]] = deque()
        self.reserved: dict[str, Charge] = {}

    async def call(self, tenant: str, body: dict) -> dict:
        charge = self.book.charge(tenant, body["max_tokens"])  # clean: near miss, voided by both handlers and settled otherwise
        if charge is None:
            return {"status": 429}
        try:
            async with self.channels.channel() as ch:  # clean: the context manager shuts it
                out = await ch.call(body)
        except asyncio.CancelledError:
            self.book.void(charge)
            raise
        except ChannelError:
            self.book.void(charge)
            return {"status": 502}
        self.book.settle(charge, out["tokens"])
        return out

    async def call_fast(self, tenant: str, body: dict) -> dict:
        charge = self.book.charge(tenant, body["max_tokens"])  # leak: when no channel comes in time 503 is returned with the charge open
        if charge is None:
            return {"status": 429}
        ch = await self.channels.open_within(0.2)  # clean: near miss, None is nothing, and finally shuts a real one
        if ch is None:
            return {"status": 503}
        try:
            out = await ch.call(body)
            self.book.settle(charge, out["tokens"])
            return out
        except ChannelError:
            self.book.void(charge)
            return {"status": 502}
        finally:
            self.channels.shut(ch)

    async def call_retry(self, body: dict, attempts: int = 3) -> dict:
        for _ in range(attempts):
            ch = await self.channels.open()  # leak: an answer without tokens returns from the middle without shut
            try:
                out = await ch.call(body)
            except ChannelError:
                self.channels.shut(ch)
                continue
            if not out["tokens"]:
                return {"status": 204}
            self.channels.shut(ch)
            return out
        return {"status": 502}

    def enqueue(self, tenant: str, body: dict) -> bool:
        charge = self.book.charge(tenant, body["max_tokens"])  # leak: flush() skips an expired item by continue and never voids its charge
        if charge is None:
            return False
        self.batch.append((charge, body))
        return True

    async def flush(self, now: float) -> int:
        sent = 0
        while self.batch:
            charge, body = self.batch.popleft()
            if body.get("deadline", now) < now:
                continue
            try:
                async with self.channels.channel() as ch:  # clean: the context manager shuts it
                    out = await ch.call(body)
            except ChannelError:
                self.book.void(charge)
                continue
            self.book.settle(charge, out["tokens"])
            sent += 1
        return sent

    def reserve(self, tenant: str, tokens: int) -> bool:
        fresh = self.book.charge(tenant, tokens)  # clean: near miss, the former reservation is taken out and voided
        if fresh is None:
            return False
        former = self.reserved.pop(tenant, None)
        if former is not None:
            self.book.void(former)
        self.reserved[tenant] = fresh
        return True

    def top_up(self, tenant: str, tokens: int) -> bool:
        former = self.reserved.get(tenant)
        want = tokens if former is None else former.tokens + tokens
        fresh = self.book.charge(tenant, want)  # leak: the larger reservation overwrites the former one, which stays open
        if fresh is None:
            return False
        self.reserved[tenant] = fresh
        return True

    def cancel(self, tenant: str) -> None:
        charge = self.reserved.pop(tenant, None)
        if charge is not None:
            self.book.void(charge)

    def split(self, shares: dict[str, int]) -> dict[str, Charge]:
        got: dict[str, Charge] = {}
        for tenant, tokens in shares.items():
            charge = self.book.charge(tenant, tokens)  # clean: near miss, a refusal voids what the others were charged
            if charge is None:
                for other in got.values():
                    self.book.void(other)
                return {}
            got[tenant] = charge
        return got

    async def broadcast(self, shares: dict[str, int], body: dict) -> int:
        charges = self.split(shares)  # clean: near miss, every charge is settled or voided in the loop
        done = 0
        for charge in charges.values():
            try:
                async with self.channels.channel() as ch:  # clean: the context manager shuts it
                    out = await ch.call(body)
            except ChannelError:
                self.book.void(charge)
                continue
            self.book.settle(charge, out["tokens"])
            done += 1
        return done
