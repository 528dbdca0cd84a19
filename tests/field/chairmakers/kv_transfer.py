"""KV cache transfer between prefill and decode instances (pull model).

The prefill side holds the pages of a finished prompt until the decode side, which
leases pages of its own and registers them as the destination, has read them.
"""
import asyncio
import logging
import struct
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger("pd")

Peer = Tuple[str, int]
FRAME = struct.Struct("<I")
OK = b"ok"


class PeerDown(ConnectionError):
    pass


class TransferFailed(RuntimeError):
    pass


class RegistrationLimit(RuntimeError):
    pass


class Pages:
    def __init__(self, count: int):
        self._free = list(range(count))

    def lease(self, n: int) -> Optional[List[int]]:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]  # clean: near miss, the count was checked, so the list is whole

    def give(self, pages: List[int]) -> None:
        self._free.extend(pages)


@dataclass
class Region:
    key: int
    pages: List[int]


class Registry:
    def __init__(self, nic, kv, limit: int = 128):
        self.nic, self.kv, self.limit = nic, kv, limit
        self._live: Dict[int, Region] = {}

    def register(self, pages: List[int]) -> Region:
        if len(self._live) >= self.limit:
            raise RegistrationLimit(f"{self.limit} regions are registered")
        key = self.nic.reg_mr(self.kv.addresses(pages), self.kv.page_bytes)  # clean: wrapped into the region that is returned
        region = Region(key, pages)
        self._live[key] = region
        return region

    def deregister(self, region: Region) -> None:
        self._live.pop(region.key)
        self.nic.dereg_mr(region.key)


class Link:
    def __init__(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.peer, self.reader, self.writer = peer, reader, writer

    async def ask(self, payload: bytes) -> bytes:
        self.writer.write(FRAME.pack(len(payload)) + payload)
        await self.writer.drain()
        (n,) = FRAME.unpack(await self.reader.readexactly(FRAME.size))
        return await self.reader.readexactly(n)


class Links:
    """At most `per_peer` links to every peer, reused."""

    def __init__(self, per_peer: int = 4):
        self._idle: Dict[Peer, List[Link]] = defaultdict(list)
        self._room: Dict[Peer, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(per_peer))

    async def dial(self, peer: Peer) -> Link:
        await self._room[peer].acquire()  # leak: a refused connection becomes PeerDown and the permit is not released
        if self._idle[peer]:
            return self._idle[peer].pop()  # clean: handed to the caller
        try:
            reader, writer = await asyncio.open_connection(*peer)  # clean: the link carries the writer and hang_up() keeps or closes it
        except OSError as exc:
            raise PeerDown(f"{peer}: {exc}") from exc
        return Link(peer, reader, writer)

    def hang_up(self, link: Link, broken: bool = False) -> None:
        if broken:
            link.writer.close()
        else:
            self._idle[link.peer].append(link)
        self._room[link.peer].release()

    def close(self) -> None:
        for links in self._idle.values():
            while links:
                links.pop().writer.close()


@dataclass
class Offer:
    req_id: str
    peer: Peer
    num_pages: int
    remote_key: int


@dataclass
class Job:
    req_id: str
    pages: List[int]
    region: Region
    task: Optional["asyncio.Task[None]"] = None


class DecodeSide:
    def __init__(self, pages: Pages, registry: Registry, links: Links):
        self.pages, self.registry, self.links = pages, registry, links
        self.jobs: Dict[str, Job] = {}

    def accept(self, offer: Offer) -> bool:
        """Starts the pull. False: no room now, the router should try another instance."""
        if offer.req_id in self.jobs:
            return True
        pages = self.pages.lease(offer.num_pages)  # clean: near miss, given back at the registration limit, else owned by the job
        if pages is None:
            return False
        try:
            region = self.registry.register(pages)  # clean: near miss, owned by the job, which claim(), _drop() and abort() take apart
        except RegistrationLimit:
            self.pages.give(pages)
            return False
        job = Job(offer.req_id, pages, region)
        self.jobs[offer.req_id] = job
        job.task = asyncio.get_running_loop().create_task(self._pull(job, offer))
        return True

    async def _pull(self, job: Job, offer: Offer) -> None:
        link = await self.links.dial(offer.peer)  # leak: abort() cancels this task while it waits for the answer
        request = struct.pack("<QQI", offer.remote_key, job.region.key, len(job.pages))
        answer = await link.ask(request)
        self.links.hang_up(link)
        if answer != OK:
            raise TransferFailed(f"{job.req_id}: {answer!r}")

    def _drop(self, job: Job) -> None:
        self.registry.deregister(job.region)
        self.pages.give(job.pages)

    async def claim(self, req_id: str) -> Optional[List[int]]:
        """The filled pages, which are the caller's from then on."""
        job = self.jobs.pop(req_id)
        try:
            await job.task
        except (PeerDown, TransferFailed) as exc:
            logger.warning("pull failed, the prompt is recomputed: %s", exc)
            self._drop(job)
            return None
        self.registry.deregister(job.region)
        return job.pages

    def abort(self, req_id: str) -> None:
        job = self.jobs.pop(req_id, None)
        if job is None:
            return
        job.task.cancel()
        self._drop(job)


@dataclass
class Held:
    pages: List[int]
    region: Region
    deadline: float


class PrefillSide:
    def __init__(self, pages: Pages, registry: Registry, model, ttl: float = 60.0):
        self.pages, self.registry, self.model, self.ttl = pages, registry, model, ttl
        self.held: Dict[str, Held] = {}

    def hold(self, req_id: str, pages: List[int]) -> Region:
        region = self.registry.register(pages)  # leak: expire() gives the pages back but leaves the region registered
        self.held[req_id] = Held(pages, region, time.monotonic() + self.ttl)
        return region

    def prefill(self, req_id: str, tokens: List[int], page_size: int) -> Optional[Region]:
        pages = self.pages.lease(-(-len(tokens) // page_size))  # leak: hold() raises RegistrationLimit before anybody has noted the pages
        if pages is None:
            return None
        self.model.forward(tokens, pages)
        return self.hold(req_id, pages)

    def pulled(self, req_id: str) -> None:
        held = self.held.pop(req_id, None)
        if held is not None:
            self.registry.deregister(held.region)
            self.pages.give(held.pages)

    def expire(self) -> int:
        stale = [r for r, h in self.held.items() if h.deadline < time.monotonic()]
        for req_id in stale:
            held = self.held.pop(req_id)
            self.pages.give(held.pages)
            logger.info("%s was never pulled", req_id)
        return len(stale)


class DecodeLoop:
    def __init__(self, side: DecodeSide, model):
        self.side, self.model = side, model

    async def serve(self, offer: Offer, max_tokens: int) -> List[int]:
        if not self.side.accept(offer):
            return []
        pages = await self.side.claim(offer.req_id)  # clean: given back in the finally
        if pages is None:
            return []
        out: List[int] = []
        try:
            while len(out) < max_tokens:
                out.append(await self.model.decode(pages, out))
        finally:
            self.side.pages.give(pages)
        return out


async def ping_peers(links: Links, peers: List[Peer]) -> List[Peer]:
    alive = []
    for peer in peers:
        try:
            link = await links.dial(peer)  # leak: a peer that gives another answer is skipped with its link
        except PeerDown:
            continue
        if await link.ask(b"ping") != OK:
            continue
        links.hang_up(link)
        alive.append(peer)
    return alive


async def tell_drained(links: Links, router: Peer) -> None:
    link = await links.dial(router)  # clean: hung up on both paths
    try:
        await link.ask(b"drained")
    except (OSError, asyncio.IncompleteReadError):
        links.hang_up(link, broken=True)
        return
    links.hang_up(link)
