"""Prefill side."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from .memory import Credits, MemoryRegion, NoCredit, OutOfRegions, RegionRegistry

log = logging.getLogger(__name__)


class PeerGone(Exception):
    pass


@dataclass
class Transfer:
    rid: str
    region: MemoryRegion
    peer: "Peer"
    layers_left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Peer:
    def __init__(self, name: str, link, window: int) -> None:
        self.name, self.link = name, link
        self.credits = Credits(window)

    async def write(self, region: MemoryRegion, offset: int, n: int) -> None:
        if not self.link.up:
            raise PeerGone(self.name)
        await self.link.write(region.key, offset, n)


class Sender:
    def __init__(self, registry: RegionRegistry, peers: dict[str, Peer]) -> None:
        self.registry, self.peers = registry, peers
        self.transfers: dict[str, Transfer] = {}
        self._tasks: set[asyncio.Task] = set()

    def begin(self, rid: str, peer: str, size: int, layers: int) -> Transfer | None:
        try:
            region = self.registry.acquire(size)  # leak: cancel() takes the transfer out of the table and forgets its region
        except OutOfRegions:
            return None
        tr = Transfer(rid, region, self.peers[peer], layers)
        self.transfers[rid] = tr
        return tr

    def layer_ready(self, tr: Transfer, offset: int, n: int) -> None:
        """Called by the model after each layer; the copy goes on in the background."""
        region = self.registry.share(tr.region)  # clean: near miss, the task releases the shared reference in finally
        task = asyncio.create_task(self._push(tr, region, offset, n))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _push(self, tr: Transfer, region: MemoryRegion, offset: int, n: int) -> None:
        try:
            await tr.peer.credits.take(5.0)  # leak: a write to a peer that is gone is logged and the credit is not given back
            await tr.peer.write(region, offset, n)
            tr.peer.credits.give()
        except (NoCredit, PeerGone) as exc:
            log.warning("%s: layer at %d is lost: %r", tr.rid, offset, exc)
        finally:
            self.registry.release(region)
            tr.layers_left -= 1
            if tr.layers_left == 0:
                tr.done.set()

    async def finish(self, rid: str) -> None:
        tr = self.transfers[rid]
        await tr.done.wait()
        self.transfers.pop(rid)
        self.registry.release(tr.region)

    def cancel(self, rid: str) -> bool:
        return self.transfers.pop(rid, None) is not None

    async def send_small(self, peer: Peer, payload: bytes) -> bool:
        """Metadata; dropped rather than delayed."""
        if not peer.credits.try_take():  # clean: near miss, given in finally once it was granted
            return False
        try:
            region = self.registry.acquire(len(payload))  # clean: released after the write, in the inner finally
            try:
                await peer.write(region, 0, len(payload))
            finally:
                self.registry.release(region)
        except (OutOfRegions, PeerGone):
            return False
        finally:
            peer.credits.give()
        return True

    async def mirror(self, names: list[str], size: int) -> int:
        """The same region to several peers, each of which holds a reference while it is written."""
        region = self.registry.acquire(size)  # clean: the own reference is released at the end
        sent = 0
        for name in names:
            ref = self.registry.share(region)  # leak: a peer that is down is skipped after the reference was taken
            if not self.peers[name].link.up:
                continue
            try:
                await self.peers[name].write(ref, 0, size)
                sent += 1
            except PeerGone:
                log.info("%s went away", name)
            self.registry.release(ref)
        self.registry.release(region)
        return sent

    async def drain(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rid in list(self.transfers):
            self.registry.release(self.transfers.pop(rid).region)
