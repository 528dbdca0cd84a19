import asyncio
import logging
import typing as t

from .registry import Lease, LeaseLost, NoWorker, Registry
from .relay import Relay, Ring

log = logging.getLogger("routelet")


class Router:
    def __init__(self, registry: Registry, http: t.Any, cells: int = 256) -> None:
        self.registry = registry
        self.http = http
        self.ring = Ring(cells)
        self.sticky: t.Dict[str, Lease] = {}
        self.jobs: t.Dict[str, "asyncio.Task[None]"] = {}

    async def generate(self, body: dict, client: t.Any) -> bool:
        tried: t.Set[str] = set()
        for _ in range(3):
            try:
                lease = await self.registry.lease(2.0, tried)  # leak: LeaseLost starts the next round and the lease on the lost worker is not released
            except NoWorker:
                return False
            tried.add(lease.worker.wid)
            relay = Relay(self.ring, client)
            try:
                lease.check()
                await asyncio.gather(
                    relay.feed(self.http.stream(lease.worker.url, body)), relay.drain()
                )
            except LeaseLost as exc:
                log.warning("lost %s", exc)
                continue
            await lease.release()
            return True
        return False

    async def embed(self, body: dict) -> t.Optional[dict]:
        try:
            async with await self.registry.lease(1.0) as lease:  # clean: released by the async with
                lease.check()
                return await self.http.post(lease.worker.url, body)
        except (NoWorker, LeaseLost):
            return None

    async def chat_turn(self, sid: str, body: dict) -> dict:
        lease = self.sticky.get(sid)
        if lease is not None and lease.worker.gone:
            del self.sticky[sid]
            await lease.release()
            lease = None
        if lease is None:
            lease = await self.registry.lease(5.0)  # clean: near miss, goes into the table, or is released here when another turn was faster
            kept = self.sticky.setdefault(sid, lease)
            if kept is not lease:
                await lease.release()
                lease = kept
        return await self.http.post(lease.worker.url, dict(body, slot=lease.slot))

    async def end_chat(self, sid: str) -> None:
        lease = self.sticky.pop(sid, None)
        if lease is not None:
            await lease.release()

    async def disaggregated(self, body: dict) -> t.Optional[dict]:
        try:
            pre, dec = await self.registry.lease_pair(3.0)  # clean: near miss, the first is released ahead of decoding or in the finally, the second there
        except NoWorker:
            return None
        try:
            pre.check()
            handle = await self.http.post(pre.worker.url, dict(body, phase="prefill"))
            await pre.release()
            dec.check()
            return await self.http.post(dec.worker.url, {"phase": "decode", "kv": handle})
        except LeaseLost:
            return None
        finally:
            await pre.release()
            await dec.release()

    async def start_job(self, jid: str, body: dict) -> None:
        """Runs in the background. A job of the same name is stopped first."""
        old = self.jobs.pop(jid, None)
        if old is not None:
            old.cancel()
        lease = await self.registry.lease(30.0)  # leak: _job releases it only after its post, so that a cancelled job keeps it
        self.jobs[jid] = asyncio.create_task(self._job(jid, lease, body))

    async def _job(self, jid: str, lease: Lease, body: dict) -> None:
        try:
            answer = await self.http.post(lease.worker.url, body)
        except asyncio.CancelledError:
            log.info("job %s was stopped", jid)
            raise
        await lease.release()
        log.info("job %s: %s", jid, answer.get("status"))

    async def broadcast(self, path: str) -> int:
        """Calls every worker once, for instance to flush its caches."""
        seen: t.Set[str] = set()
        while True:
            lease = self.registry.try_lease(avoid=seen)  # clean: released in the finally for either outcome
            if lease is None:
                return len(seen)
            seen.add(lease.worker.wid)
            try:
                lease.check()
                await self.http.post(lease.worker.url + path, {})
            except LeaseLost:
                continue
            finally:
                await lease.release()

    async def close(self) -> None:
        for task in self.jobs.values():
            task.cancel()
        for sid in list(self.sticky):
            await self.end_chat(sid)
