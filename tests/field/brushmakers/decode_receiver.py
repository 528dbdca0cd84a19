"""Decode side: admits transferred requests, bounded by permits and landing zones."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set

logger = logging.getLogger("pd.decode")


@dataclass
class Zone:
    index: int
    nbytes: int
    owner: Optional[str] = None


class LandingZones:
    """Registered receive regions in an asyncio queue."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._q: "asyncio.Queue[Zone]" = asyncio.Queue()
        for i in range(count):
            self._q.put_nowait(Zone(i, nbytes))

    async def obtain(self) -> Zone:
        return await self._q.get()  # clean: returned to the caller

    def obtain_nowait(self) -> Optional[Zone]:
        try:
            return self._q.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            return None

    async def obtain_sized(self, nbytes: int) -> Optional[Zone]:
        zone = await self._q.get()  # leak: a zone that is too small is taken off the queue for good
        if zone.nbytes < nbytes:
            return None
        return zone

    def relinquish(self, zone: Zone) -> None:
        zone.owner = None
        self._q.put_nowait(zone)


@dataclass
class Incoming:
    rid: str
    nbytes: int
    bootstrap: Optional[str] = None
    zone: Optional[Zone] = None
    blocks: List[int] = field(default_factory=list)
    failed: bool = False


class DecodeReceiver:
    def __init__(self, zones: LandingZones, transport, max_inflight: int = 16) -> None:
        self.zones = zones
        self.transport = transport
        self.permits = asyncio.Semaphore(max_inflight)
        self.live: Dict[str, Incoming] = {}
        self.tasks: Set[asyncio.Task] = set()

    # -- one request at a time -------------------------------------------
    async def pull(self, req: Incoming) -> Optional[bytes]:
        async with self.permits:  # clean: the async with releases it
            zone = await self.zones.obtain()  # clean: relinquished in the finally
            try:
                if not await self.transport.handshake(req.bootstrap):
                    return None
                return await self.transport.read(zone.index, req.nbytes)
            finally:
                self.zones.relinquish(zone)

    async def pull_small(self, req: Incoming) -> Optional[bytes]:
        await self.permits.acquire()  # leak: a request too large for a zone returns before the release
        zone = self.zones.obtain_nowait()  # clean: relinquished for a large request, and after the read
        if zone is None:
            self.permits.release()
            return None
        if req.nbytes > zone.nbytes:
            self.zones.relinquish(zone)
            return None
        try:
            return await self.transport.read(zone.index, req.nbytes)
        finally:
            self.zones.relinquish(zone)
            self.permits.release()

    async def peek_header(self, req: Incoming) -> Optional[dict]:
        zone = await self.zones.obtain()  # leak: a header of another version makes it return None without relinquishing
        raw = await self.transport.read(zone.index, 64)
        head = self.transport.parse(raw)
        if head.get("version") != 2:
            logger.error("%s: header version %s", req.rid, head.get("version"))
            return None
        self.zones.relinquish(zone)
        return head

    # -- admission -------------------------------------------------------
    async def admit(self, req: Incoming) -> bool:
        if req.rid in self.live:
            return False
        await self.permits.acquire()  # clean: near miss, retire() releases it for each live request
        req.zone = await self.zones.obtain()  # clean: kept in req.zone, retire() relinquishes it
        req.zone.owner = req.rid
        self.live[req.rid] = req
        return True

    def retire(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        if req.zone is not None:
            self.zones.relinquish(req.zone)
            req.zone = None
        self.permits.release()

    def abort_all(self) -> None:
        for rid in list(self.live):
            self.retire(rid)

    async def replace_zone(self, rid: str) -> None:
        """The NIC marked the region bad; move the request to another one."""
        req = self.live[rid]
        fresh = await self.zones.obtain()  # leak: a request retired in the meantime gets no new zone and it is dropped
        if req.rid not in self.live:
            logger.info("%s retired while waiting", rid)
            return
        if req.zone is not None:
            self.zones.relinquish(req.zone)
        req.zone = fresh

    # -- background ------------------------------------------------------
    async def _land(self, req: Incoming, zone: Zone) -> None:
        try:
            data = await self.transport.read(zone.index, req.nbytes)
            req.failed = data is None
        finally:
            self.zones.relinquish(zone)
            self.permits.release()

    async def spawn_many(self, reqs: List[Incoming]) -> int:
        started = 0
        for req in reqs:
            await self.permits.acquire()  # leak: failed requests continue with the permit held
            if req.failed:
                continue
            zone = await self.zones.obtain()  # clean: the task relinquishes it
            task = asyncio.create_task(self._land(req, zone))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            started += 1
        return started

    async def read_retry(self, req: Incoming, tries: int = 3) -> Optional[bytes]:
        zone: Optional[Zone] = None
        for _ in range(tries):
            zone = await self.zones.obtain()  # leak: a timed out try keeps its zone and the next one rebinds it
            try:
                data = await asyncio.wait_for(self.transport.read(zone.index, req.nbytes), 2.0)
            except asyncio.TimeoutError:
                continue
            self.zones.relinquish(zone)
            return data
        return None

    async def read_once_per_peer(self, req: Incoming, peers: List[str]) -> Optional[bytes]:
        zone = await self.zones.obtain()  # clean: near miss, one zone for all peers, relinquished after the loop
        data = None
        try:
            for peer in peers:
                if not await self.transport.handshake(peer):
                    continue
                data = await self.transport.read(zone.index, req.nbytes)
                if data is not None:
                    break
        finally:
            self.zones.relinquish(zone)
        return data
