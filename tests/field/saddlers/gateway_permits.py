"""Front gateway: per-tenant rate permits and in-flight limits in front of the model replicas."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("gateway")


class Overloaded(Exception):
    pass


class UpstreamError(Exception):
    pass


class PermitBucket:
    """Permits for one tenant. Waits up to ``patience`` seconds for a permit."""

    def __init__(self, limit: int, patience: float = 0.05) -> None:
        self.limit = limit
        self.in_use = 0
        self.patience = patience
        self._cond = asyncio.Condition()

    async def take(self) -> None:
        async with self._cond:
            try:
                await asyncio.wait_for(self._cond.wait_for(lambda: self.in_use < self.limit), self.patience)
            except asyncio.TimeoutError:
                raise Overloaded("no permit") from None
            self.in_use += 1

    def take_nowait(self) -> bool:
        if self.in_use >= self.limit:
            return False
        self.in_use += 1
        return True

    async def hand_back(self) -> None:
        async with self._cond:
            self.in_use -= 1
            self._cond.notify()


Upstream = Callable[[str, str], Awaitable[str]]


class Gateway:
    def __init__(self, upstream: Upstream, limit: int = 4, replicas: int = 2) -> None:
        self.upstream = upstream
        self.limit = limit
        self.buckets: Dict[str, PermitBucket] = {}
        self.replica_slots = [asyncio.Semaphore(2) for _ in range(replicas)]
        self.background: set = set()
        self.blocked: set = set()

    def bucket(self, tenant: str) -> PermitBucket:
        if tenant not in self.buckets:
            self.buckets[tenant] = PermitBucket(self.limit)
        return self.buckets[tenant]

    async def complete(self, tenant: str, prompt: str) -> Optional[str]:
        bucket = self.bucket(tenant)
        await bucket.take()  # clean: finally hands it back on each way
        try:
            if not prompt:
                return None
            return await self.upstream(tenant, prompt)
        except UpstreamError:
            return None
        finally:
            await bucket.hand_back()

    async def complete_checked(self, tenant: str, prompt: str) -> Optional[str]:
        bucket = self.bucket(tenant)
        await bucket.take()  # leak: blocked tenants are turned away between take and try
        if tenant in self.blocked:
            log.info("tenant %s is blocked", tenant)
            return None
        try:
            return await self.upstream(tenant, prompt)
        finally:
            await bucket.hand_back()

    async def complete_with_retry(self, tenant: str, prompt: str, attempts: int = 3) -> Optional[str]:
        bucket = self.bucket(tenant)
        for i in range(attempts):
            await bucket.take()  # leak: a caught upstream error goes on to the next attempt without handing back
            try:
                answer = await self.upstream(tenant, prompt)
            except UpstreamError:
                await asyncio.sleep(0.001 * (2 ** i) * random.random())
                continue
            await bucket.hand_back()
            return answer
        return None

    async def complete_patiently(self, tenant: str, prompt: str, attempts: int = 3) -> Optional[str]:
        """Keeps one permit over all attempts."""
        bucket = self.bucket(tenant)
        for _ in range(attempts):
            try:
                await bucket.take()  # clean: near miss, Overloaded means that nothing was taken
            except Overloaded:
                continue
            break
        else:
            return None
        try:
            return await self.upstream(tenant, prompt)
        finally:
            await bucket.hand_back()

    async def _relay(self, bucket: PermitBucket, tenant: str, prompt: str) -> None:
        try:
            await self.upstream(tenant, prompt)
        except UpstreamError:
            log.warning("relay failed for %s", tenant)
        finally:
            await bucket.hand_back()

    async def fire_and_forget(self, tenant: str, prompt: str) -> bool:
        bucket = self.bucket(tenant)
        if not bucket.take_nowait():  # clean: near miss, the relay task hands it back
            return False
        task = asyncio.create_task(self._relay(bucket, tenant, prompt))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True

    async def _mirror(self, bucket: PermitBucket, tenant: str, prompt: str) -> None:
        if len(prompt) > 1000:
            return
        try:
            await self.upstream(tenant, prompt)
        except UpstreamError:
            pass
        await bucket.hand_back()

    async def shadow(self, tenant: str, prompt: str) -> bool:
        bucket = self.bucket(tenant)
        if not bucket.take_nowait():  # leak: the mirror task returns for long prompts without handing back
            return False
        task = asyncio.create_task(self._mirror(bucket, tenant, prompt))
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return True

    async def on_replica(self, tenant: str, prompt: str, idx: int) -> Optional[str]:
        """Takes the tenant's permit and a slot on one replica."""
        bucket = self.bucket(tenant)
        slot = self.replica_slots[idx]
        if not bucket.take_nowait():  # leak: a busy replica answers None with the permit kept
            return None
        if slot.locked():
            return None
        await slot.acquire()  # clean: released in the finally
        try:
            return await self.upstream(tenant, prompt)
        finally:
            slot.release()
            await bucket.hand_back()

    async def _pick_replica(self) -> int:
        """Index of a replica whose slot is now taken, or -1."""
        for i, slot in enumerate(self.replica_slots):
            if not slot.locked():
                await slot.acquire()  # clean: handed to the caller with the index
                return i
        return -1

    async def any_replica(self, tenant: str, prompt: str) -> Optional[str]:
        idx = await self._pick_replica()  # clean: near miss, -1 holds nothing and the rest is released
        if idx < 0:
            return None
        try:
            return await self.upstream(tenant, prompt)
        finally:
            self.replica_slots[idx].release()

    async def ping_any(self) -> bool:
        idx = await self._pick_replica()  # leak: the ping's caught error returns False before release
        if idx < 0:
            return False
        try:
            await self.upstream("health", "ping")
        except UpstreamError:
            return False
        self.replica_slots[idx].release()
        return True

    @contextlib.asynccontextmanager
    async def permit(self, tenant: str) -> AsyncIterator[PermitBucket]:
        bucket = self.bucket(tenant)
        await bucket.take()  # clean: finally of the context manager
        try:
            yield bucket
        finally:
            await bucket.hand_back()

    async def stream(self, tenant: str, prompts: List[str]) -> int:
        done = 0
        for p in prompts:
            if not p:
                continue
            async with self.permit(tenant):  # clean: context manager
                if p == "stop":
                    break
                await self.upstream(tenant, p)
                done += 1
        return done

    async def drain(self) -> None:
        if self.background:
            await asyncio.gather(*self.background)


async def _main() -> None:
    async def upstream(tenant: str, prompt: str) -> str:
        await asyncio.sleep(0)
        if prompt == "bad":
            raise UpstreamError(prompt)
        return prompt[::-1]

    gw = Gateway(upstream)
    assert await gw.complete("a", "abc") == "cba"
    assert await gw.complete("a", "bad") is None
    await gw.complete_checked("a", "x")
    await gw.complete_with_retry("a", "x")
    await gw.complete_patiently("a", "x")
    await gw.fire_and_forget("a", "bad")
    await gw.shadow("a", "x")
    await gw.on_replica("a", "x", 0)
    await gw.any_replica("a", "x")
    await gw.ping_any()
    assert await gw.stream("a", ["x", "", "stop", "y"]) == 1
    await gw.drain()
    assert gw.bucket("a").in_use == 0


if __name__ == "__main__":
    asyncio.run(_main())
