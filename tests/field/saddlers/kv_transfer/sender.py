from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Dict, List, Optional, Set

from .staging import StagingBuffer, StagingPool, staged

log = logging.getLogger(__name__)


class LinkDown(ConnectionError):
    pass


class Link:
    """Stand-in for the RDMA or TCP channel to a peer."""

    def __init__(self, peer: str, fail_on: Optional[bytes] = None) -> None:
        self.peer = peer
        self.fail_on = fail_on
        self.wire: List[bytes] = []
        self.closed = False

    async def send(self, buf: StagingBuffer) -> None:
        await asyncio.sleep(0)
        if self.fail_on is not None and buf.bytes() == self.fail_on:
            raise LinkDown(self.peer)
        self.wire.append(buf.bytes())


class Sender:
    def __init__(self, pool: StagingPool, links: Dict[str, Link]) -> None:
        self.pool = pool
        self.links = links
        self.tasks: Set[asyncio.Task] = set()
        self.unacked: Dict[int, StagingBuffer] = {}
        self._seq = itertools.count()

    async def send(self, peer: str, payload: bytes) -> bool:
        buf = await staged(self.pool, payload)  # clean: finally checks in
        try:
            await self.links[peer].send(buf)
            return True
        except LinkDown:
            return False
        finally:
            self.pool.checkin_buffer(buf)

    async def send_layers(self, peer: str, layers: List[bytes]) -> int:
        sent = 0
        link = self.links[peer]
        for payload in layers:
            buf = await staged(self.pool, payload)  # leak: the caught LinkDown goes on without check-in
            try:
                await link.send(buf)
            except LinkDown:
                log.warning("layer lost on %s", peer)
                continue
            sent += 1
            self.pool.checkin_buffer(buf)
        return sent

    async def broadcast(self, payload: bytes) -> int:
        buf = await self.pool.checkout_buffer()  # clean: near miss, break leads to the check-in as well
        buf.load(payload)
        sent = 0
        for link in self.links.values():
            if link.closed:
                break
            try:
                await link.send(buf)
            except LinkDown:
                continue
            sent += 1
        self.pool.checkin_buffer(buf)
        return sent

    async def _push(self, link: Link, buf: StagingBuffer) -> None:
        try:
            await link.send(buf)
        except LinkDown:
            link.closed = True
        finally:
            self.pool.checkin_buffer(buf)

    async def post(self, peer: str, payload: bytes) -> None:
        buf = await staged(self.pool, payload)  # clean: the task checks it in
        task = asyncio.create_task(self._push(self.links[peer], buf))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def post_if_open(self, peer: str, payload: bytes) -> bool:
        buf = await staged(self.pool, payload)  # leak: unknown or closed peer returns False after staging
        link = self.links.get(peer)
        if link is None or link.closed:
            return False
        task = asyncio.create_task(self._push(link, buf))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True

    async def send_acked(self, peer: str, payload: bytes) -> int:
        """The buffer stays in ``unacked`` until the peer acknowledges it."""
        buf = await staged(self.pool, payload)  # clean: unacked owns it, ack and abort check in
        seq = next(self._seq)
        self.unacked[seq] = buf
        await self.links[peer].send(buf)
        return seq

    def ack(self, seq: int) -> None:
        buf = self.unacked.pop(seq, None)
        if buf is not None:
            self.pool.checkin_buffer(buf)

    def abort(self) -> None:
        for buf in self.unacked.values():
            self.pool.checkin_buffer(buf)
        self.unacked.clear()

    async def flush(self) -> None:
        if self.tasks:
            await asyncio.gather(*self.tasks)
