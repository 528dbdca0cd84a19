import asyncio
import contextlib
import logging
from typing import Any, AsyncIterator, Callable, Dict, List, Optional

from .jobs import Job, Rung, open_job
from .packets import Bitstreams, Packet
from .sessions import Farm, NoSession

log = logging.getLogger(__name__)


class Subscriber:
    def __init__(self, rendition: str, depth: int = 64) -> None:
        self.rendition = rendition
        self.queue: "asyncio.Queue[Optional[Packet]]" = asyncio.Queue(depth)
        self.lost = 0

    def offer(self, packet: Packet) -> None:
        """The queue gets a reference of its own."""
        mine = packet.retain()  # leak: a subscriber that is too slow has the packet dropped in the handler, with the reference
        try:
            self.queue.put_nowait(mine)
        except asyncio.QueueFull:
            self.lost += 1

    async def packets(self) -> AsyncIterator[bytes]:
        while True:
            packet = await self.queue.get()
            if packet is None:
                return
            data = bytes(packet.payload())
            packet.release()
            yield data

    def leave(self) -> None:
        while not self.queue.empty():
            packet = self.queue.get_nowait()
            if packet is not None:
                packet.release()


class Service:
    def __init__(self, farm: Farm, pool: Bitstreams, scale: Callable[[Any, int], Any]) -> None:
        self.farm = farm
        self.pool = pool
        self.scale = scale
        self.jobs: Dict[str, Job] = {}
        self.subs: Dict[str, List[Subscriber]] = {}
        self.archive: List[Packet] = []

    def start(self, job_id: str, ladder: List[Rung]) -> bool:
        try:
            job = open_job(job_id, ladder, self.farm, self.pool, self.scale)  # leak: for an id that is running already the new job is dropped with its sessions
        except NoSession as exc:
            log.warning("job %s: %s", job_id, exc)
            return False
        if job_id in self.jobs:
            return True
        self.jobs[job_id] = job
        self.subs.setdefault(job_id, [])
        return True

    def feed(self, job_id: str, frame: Any, pts: int) -> int:
        n = 0
        for packet in self.jobs[job_id].encode(frame, pts):  # clean: released at the end of every round, subscribers have references of their own
            for sub in self.subs[job_id]:
                if sub.rendition == packet.rendition:
                    sub.offer(packet)
            packet.release()
            n += 1
        return n

    def record(self, job_id: str, frame: Any, pts: int) -> None:
        """Like feed(), for jobs that are stored instead of watched."""
        for packet in self.jobs[job_id].encode(frame, pts):  # clean: near miss, kept in the archive, save() or close() releases it
            self.archive.append(packet)

    def save(self, write: Callable[[memoryview], None]) -> None:
        while self.archive:
            packet = self.archive.pop(0)
            write(packet.payload())
            packet.release()

    @contextlib.asynccontextmanager
    async def one_off(self, rung: Rung, timeout: float):
        session = await self.farm.open_later(rung.codec, timeout)  # clean: near miss, None is yielded as it is, a session is closed in the finally
        try:
            yield session
        finally:
            if session is not None:
                self.farm.close(session)

    def stop(self, job_id: str) -> None:
        job = self.jobs.pop(job_id, None)
        if job is None:
            return
        for packet in job.flush():  # clean: offered to the subscribers and released in the same round
            for sub in self.subs.get(job_id, ()):
                if sub.rendition == packet.rendition:
                    sub.offer(packet)
            packet.release()
        job.close()
        for sub in self.subs.pop(job_id, ()):
            sub.leave()

    def close(self) -> None:
        for job_id in list(self.jobs):
            self.stop(job_id)
        while self.archive:
            self.archive.pop().release()
