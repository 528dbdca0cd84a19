"""Prefill side."""
from __future__ import annotations

import asyncio
import logging
from typing import List, Sequence

from .pools import Link, PeerConnections, StagingBuffer, StagingPool

log = logging.getLogger(__name__)


class KVSender:
    def __init__(self, staging: StagingPool, peers: PeerConnections, model: str) -> None:
        self.staging = staging
        self.peers = peers
        self.model = model
        self.bytes_out = 0

    def _pack(self, buf: StagingBuffer, layer: bytes) -> None:
        n = min(len(layer), len(buf.view))
        buf.view[:n] = layer[:n]
        buf.used = n

    async def send_layer(self, link: Link, layer: bytes) -> int:
        buf = await self.staging.reserve()  # clean: recycled in finally
        try:
            self._pack(buf, layer)
            n = await link.write(buf.view[:buf.used])
            self.bytes_out += n
            return n
        finally:
            self.staging.recycle(buf)

    async def send_all(self, peer: str, layers: Sequence[bytes]) -> bool:
        link = await self.peers.dial(peer)  # leak: a refused hello returns with the link in hand
        if not await link.hello(self.model):
            log.warning("%s refuses %s", peer, self.model)
            return False
        for layer in layers:
            await self.send_layer(link, layer)
        self.peers.hang_up(link)
        return True

    async def send_checked(self, peer: str, layers: Sequence[bytes]) -> bool:
        link = await self.peers.dial(peer)  # clean: near miss, discarded when refused, hung up otherwise
        if not await link.hello(self.model):
            self.peers.discard(link)
            return False
        total = 0
        for layer in layers:
            total += await self.send_layer(link, layer)
        self.peers.hang_up(link)
        return total > 0

    async def send_double_buffered(self, link: Link, layers: Sequence[bytes]) -> None:
        """Pack layer i while layer i-1 is on the wire."""
        prev = None
        for layer in layers:
            buf = await self.staging.reserve()  # leak: the buffer of the last layer is not recycled
            self._pack(buf, layer)
            if prev is not None:
                await link.write(prev.view[:prev.used])
                self.staging.recycle(prev)
            prev = buf
        if prev is not None:
            await link.write(prev.view[:prev.used])

    async def _push(self, link: Link, buf: StagingBuffer) -> int:
        try:
            return await link.write(buf.view[:buf.used])
        finally:
            self.staging.recycle(buf)

    async def send_tasks(self, link: Link, layers: Sequence[bytes]) -> int:
        tasks: List[asyncio.Task] = []
        for layer in layers:
            buf = await self.staging.reserve()  # clean: near miss, _push owns it and recycles it
            self._pack(buf, layer)
            tasks.append(asyncio.create_task(self._push(link, buf)))
        return sum(await asyncio.gather(*tasks))

    async def send_callbacks(self, link: Link, layers: Sequence[bytes]) -> int:
        tasks: List[asyncio.Task] = []
        for layer in layers:
            buf = await self.staging.reserve()  # clean: near miss, the done callback recycles it
            self._pack(buf, layer)
            task = asyncio.ensure_future(link.write(buf.view[:buf.used]))
            task.add_done_callback(lambda _t, b=buf: self.staging.recycle(b))
            tasks.append(task)
        return sum(await asyncio.gather(*tasks))

    async def send_sparse(self, link: Link, layers: Sequence[bytes], floor: int) -> int:
        """Short layers are sent inline, the others in the background."""
        tasks: List[asyncio.Task] = []
        total = 0
        for layer in layers:
            buf = await self.staging.reserve()  # leak: the inline branch has no callback and no recycle
            self._pack(buf, layer)
            if buf.used < floor:
                total += await link.write(buf.view[:buf.used])
            else:
                task = asyncio.ensure_future(link.write(buf.view[:buf.used]))
                task.add_done_callback(lambda _t, b=buf: self.staging.recycle(b))
                tasks.append(task)
        return total + sum(await asyncio.gather(*tasks))
