"""Decode side."""
from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional

from .pools import Link, PeerConnections, StagingBuffer, StagingPool, TransferTable


@dataclass
class Pending:
    tid: int
    buf: StagingBuffer
    since: float = field(default_factory=time.monotonic)


class KVReceiver:
    def __init__(self, staging: StagingPool, peers: PeerConnections, table: TransferTable) -> None:
        self.staging = staging
        self.peers = peers
        self.table = table
        self.pending: Dict[str, Pending] = {}
        self.landed: Deque[StagingBuffer] = deque()
        self.timeouts = 0

    def announce(self, rid: str) -> Optional[int]:
        """A prefill instance tells us that pages for rid will come."""
        if rid in self.pending:
            return self.pending[rid].tid
        buf = self.staging.try_reserve()  # leak: expire ends the Pending and recycles no buffer
        if buf is None:
            return None
        tid = self.table.open_transfer(rid)  # clean: closed by complete and by expire
        self.pending[rid] = Pending(tid, buf)
        return tid

    def complete(self, rid: str) -> bytes:
        p = self.pending.pop(rid)
        data = bytes(p.buf.view[:p.buf.used])
        self.staging.recycle(p.buf)
        self.table.close_transfer(p.tid)
        return data

    def expire(self, max_age: float) -> List[str]:
        now = time.monotonic()
        late = [rid for rid, p in self.pending.items() if now - p.since > max_age]
        for rid in late:
            p = self.pending.pop(rid)
            self.table.close_transfer(p.tid)
            self.timeouts += 1
        return late

    async def pull(self, peer: str, pages: int) -> int:
        link = await self.peers.dial(peer)  # clean: hung up in finally
        try:
            for _ in range(pages):
                buf = await self.staging.reserve()  # clean: near miss, in landed, recycled by drain
                buf.used = await link.read_into(buf.view)
                self.landed.append(buf)
        finally:
            self.peers.hang_up(link)
        return pages

    def drain(self) -> List[bytes]:
        out = []
        while self.landed:
            buf = self.landed.popleft()
            out.append(bytes(buf.view[:buf.used]))
            self.staging.recycle(buf)
        return out

    async def fetch_retry(self, peer: str, want: int, tries: int = 3) -> Optional[bytes]:
        buf = await self.staging.reserve()  # clean: recycled after the loop and before the return in it
        for attempt in range(tries):
            link = await self.peers.dial(peer)  # leak: a short read goes to the next try with the link lost
            got = await link.read_into(buf.view[:want])
            if got == want:
                data = bytes(buf.view[:got])
                self.peers.hang_up(link)
                self.staging.recycle(buf)
                return data
            await asyncio.sleep(0.01 * (attempt + 1))
        self.staging.recycle(buf)
        return None

    async def _link_and_buffer(self, peer: str):
        link = await self.peers.dial(peer)  # clean: handed to the caller
        buf = await self.staging.reserve()  # clean: handed to the caller
        return link, buf

    async def read_header(self, peer: str, size: int = 64) -> bytes:
        link, buf = await self._link_and_buffer(peer)  # clean: both given back after the read
        n = await self._exactly(link, buf, size)
        head = bytes(buf.view[:n])
        self.staging.recycle(buf)
        self.peers.hang_up(link)
        return head

    async def read_footer(self, peer: str, size: int = 64) -> bytes:
        link, buf = await self._link_and_buffer(peer)  # leak: only the link is given back
        n = await self._exactly(link, buf, size)
        tail = bytes(buf.view[max(0, n - size):n])
        self.peers.hang_up(link)
        return tail

    async def _exactly(self, link: Link, buf: StagingBuffer, size: int) -> int:
        n = 0
        while n < size:
            n += await link.read_into(buf.view[n:size])
        return n
