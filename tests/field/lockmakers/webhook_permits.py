"""Outbound webhooks and tool calls: rate permits, circuit slots, retries."""

import asyncio
import enum
import random
import time


class Rejected(Exception):
    pass


class Verdict(enum.Enum):
    OK = 1
    RETRY = 2
    GIVE_UP = 3


class Permit:
    __slots__ = ("host", "since")

    def __init__(self, host):
        self.host = host
        self.since = time.monotonic()


class PermitBox:
    """Named permits: every destination has its own count and they all share a global one."""

    def __init__(self, total, per_host):
        self.total = asyncio.Semaphore(total)
        self.per_host = per_host
        self._used = {}

    def _take_host(self, host):
        n = self._used.get(host, 0)
        if n >= self.per_host:
            return False
        self._used[host] = n + 1
        return True

    def _drop_host(self, host):
        self._used[host] -= 1

    async def claim(self, host):
        await self.total.acquire()  # clean: near miss, released before the raise, otherwise goes with the claim
        if not self._take_host(host):  # clean: the host's permit goes with the claim
            self.total.release()
            raise Rejected(host)
        return Permit(host)

    async def claim_soft(self, host):
        """A permit or None."""
        if not self._take_host(host):  # leak: when the global permits are locked None is returned without _drop_host
            return None
        if self.total.locked():
            return None
        await self.total.acquire()  # clean: goes with the claim
        return Permit(host)

    def unclaim(self, claim):
        self._drop_host(claim.host)
        self.total.release()


class Breaker:
    """Half-open circuit: limited trial tickets."""

    def __init__(self, trials=1):
        self._tickets = [object() for _ in range(trials)]
        self.open_until = 0.0

    def ticket(self):
        if time.monotonic() < self.open_until or not self._tickets:
            return None
        return self._tickets.pop()  # clean: returned to the caller

    def redeem(self, ticket, ok):
        self._tickets.append(ticket)
        if not ok:
            self.open_until = time.monotonic() + 5


class Claim:
    """async with Claim(box, host)"""

    def __init__(self, box, host, soft=False):
        self.box, self.host, self.soft = box, host, soft
        self.claim = None

    async def __aenter__(self):
        if self.soft:
            self.claim = await self.box.claim_soft(self.host)  # clean: kept on self and unclaimed in __aexit__ when not None
        else:
            self.claim = await self.box.claim(self.host)  # clean: kept on self and unclaimed in __aexit__
        return self.claim

    async def __aexit__(self, *exc):
        if self.claim is not None:
            self.box.unclaim(self.claim)
        self.claim = None
        return False


class QuietClaim:
    def __init__(self, box, host):
        self.box, self.host = box, host

    async def __aenter__(self):
        self.claim = await self.box.claim(self.host)  # leak: __aexit__ returns True for a timeout before unclaim
        return self

    async def __aexit__(self, etype, exc, tb):
        if etype is asyncio.TimeoutError:
            return True
        self.box.unclaim(self.claim)
        return False


class Dispatcher:
    def __init__(self, box, breaker, transport):
        self.box = box
        self.breaker = breaker
        self.transport = transport
        self.lock = asyncio.Lock()
        self.delivered = 0

    async def send(self, host, body):
        async with Claim(self.box, host):  # clean: context manager
            return await self.transport.post(host, body)

    async def send_verdict(self, host, body):
        claim = await self.box.claim(host)  # leak: GIVE_UP returns without unclaim, unlike the other verdicts
        verdict = await self.transport.post(host, body)
        if verdict is Verdict.OK:
            self.delivered += 1
            self.box.unclaim(claim)
        elif verdict is Verdict.RETRY:
            self.box.unclaim(claim)
            await asyncio.sleep(1)
        else:
            return verdict
        return verdict

    async def send_switch(self, host, body):
        claim = await self.box.claim(host)  # clean: near miss, each of the three arms unclaims
        verdict = await self.transport.post(host, body)
        match verdict:
            case Verdict.OK:
                self.delivered += 1
                self.box.unclaim(claim)
            case Verdict.RETRY:
                self.box.unclaim(claim)
                await asyncio.sleep(random.random())
            case _:
                self.box.unclaim(claim)
        return verdict

    async def send_retrying(self, host, body, tries=5):
        for n in range(tries):
            claim = await self.box.claim(host)  # leak: OSError goes round the loop and claims again without unclaim
            try:
                verdict = await self.transport.post(host, body)
            except OSError:
                await asyncio.sleep(2 ** n)
                continue
            self.box.unclaim(claim)
            if verdict is not Verdict.RETRY:
                return verdict
        return Verdict.GIVE_UP

    async def send_holding(self, host, body, tries=5):
        claim = await self.box.claim(host)  # clean: near miss, one claim for all tries, and the finally covers break and return
        try:
            for n in range(tries):
                try:
                    return await self.transport.post(host, body)
                except OSError:
                    await asyncio.sleep(2 ** n)
            return Verdict.GIVE_UP
        finally:
            self.box.unclaim(claim)

    async def trial(self, host, body):
        ticket = self.breaker.ticket()  # leak: Rejected from the box is caught and the ticket is not redeemed
        if ticket is None:
            return None
        try:
            claim = await self.box.claim(host)  # clean: unclaimed after the post
        except Rejected:
            return None
        ok = await self.transport.post(host, body) is Verdict.OK
        self.box.unclaim(claim)
        self.breaker.redeem(ticket, ok)
        return ok

    async def flush_order(self, host, bodies):
        await self.lock.acquire()  # leak: no bodies returns 0 with the lock held
        if not bodies:
            return 0
        try:
            for body in bodies:
                await self.transport.post(host, body)
        finally:
            self.lock.release()
        return len(bodies)
