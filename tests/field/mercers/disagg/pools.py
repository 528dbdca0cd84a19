"""What both ends of a transfer draw on: staging buffers, connections, transfer ids."""
from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(eq=False)
class StagingBuffer:
    index: int
    view: memoryview
    used: int = 0


class StagingPool:
    """Registered memory; registration is slow, so buffers go round."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._slab = bytearray(count * nbytes)
        whole = memoryview(self._slab)
        self._idle: List[StagingBuffer] = [
            StagingBuffer(i, whole[i * nbytes:(i + 1) * nbytes]) for i in range(count)
        ]
        self._more = asyncio.Event()

    async def reserve(self) -> StagingBuffer:
        while not self._idle:
            self._more.clear()
            await self._more.wait()
        return self._idle.pop()

    def try_reserve(self) -> Optional[StagingBuffer]:
        return self._idle.pop() if self._idle else None

    def recycle(self, buf: StagingBuffer) -> None:
        buf.used = 0
        self._idle.append(buf)
        self._more.set()


class Link:
    """One open connection to a peer instance."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.sent = 0

    async def hello(self, model: str) -> bool:
        await asyncio.sleep(0)
        return bool(model)

    async def write(self, data: memoryview) -> int:
        await asyncio.sleep(0)
        self.sent += len(data)
        return len(data)

    async def read_into(self, data: memoryview) -> int:
        await asyncio.sleep(0)
        return len(data)


class PeerConnections:
    """A bounded number of links to each peer."""

    def __init__(self, per_peer: int = 4) -> None:
        self.per_peer = per_peer
        self._idle: Dict[str, List[Link]] = defaultdict(list)
        self._live: Dict[str, int] = defaultdict(int)

    async def dial(self, peer: str) -> Link:
        while True:
            if self._idle[peer]:
                return self._idle[peer].pop()
            if self._live[peer] < self.per_peer:
                self._live[peer] += 1
                return Link(peer)
            await asyncio.sleep(0.001)

    def hang_up(self, link: Link) -> None:
        self._idle[link.peer].append(link)

    def discard(self, link: Link) -> None:
        """For links that are broken: the peer gets its place back, the link is not reused."""
        self._live[link.peer] -= 1


class TransferTable:
    """Small integers that name a transfer in the wire format."""

    def __init__(self, size: int = 256) -> None:
        self._owner: List[Optional[str]] = [None] * size

    def open_transfer(self, rid: str) -> int:
        tid = self._owner.index(None)
        self._owner[tid] = rid
        return tid

    def close_transfer(self, tid: int) -> None:
        self._owner[tid] = None
