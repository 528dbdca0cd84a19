"""Decode side client: pulls KV from prefill workers over pooled connections."""
import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import AsyncIterator, Dict, List, Optional

log = logging.getLogger("pd.client")


class Disconnected(ConnectionError):
    pass


@dataclass
class Channel:
    peer: str
    alive: bool = True
    sent: List[bytes] = field(default_factory=list)

    async def request(self, payload: bytes) -> bytes:
        if not self.alive:
            raise Disconnected(self.peer)
        self.sent.append(payload)
        await asyncio.sleep(0)
        return payload[::-1]


class ChannelPool:
    def __init__(self, peer: str, limit: int) -> None:
        self.peer = peer
        self.limit = limit
        self.opened = 0
        self._idle: "asyncio.Queue[Channel]" = asyncio.Queue()

    async def acquire_channel(self) -> Channel:
        if self._idle.empty() and self.opened < self.limit:
            self.opened += 1
            return Channel(self.peer)
        return await self._idle.get()

    def release_channel(self, ch: Channel) -> None:
        self._idle.put_nowait(ch)

    def discard_channel(self, ch: Channel) -> None:
        ch.alive = False
        self.opened -= 1

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Channel]:
        ch = await self.acquire_channel()  # clean: both ends of the context manager hand it in
        try:
            yield ch
        finally:
            if ch.alive:
                self.release_channel(ch)
            else:
                self.discard_channel(ch)


class PrefillClient:
    def __init__(self, pools: Dict[str, ChannelPool]) -> None:
        self.pools = pools
        self.bound: Dict[str, Channel] = {}

    async def pull(self, peer: str, block: bytes) -> bytes:
        async with self.pools[peer].channel() as ch:  # clean: context manager
            return await ch.request(block)

    async def pull_logged(self, peer: str, block: bytes) -> Optional[bytes]:
        ch = await self.pools[peer].acquire_channel()  # leak: the handler logs and returns without handing the channel in
        try:
            data = await ch.request(block)
        except Disconnected:
            log.warning("peer %s went away", peer)
            return None
        self.pools[peer].release_channel(ch)
        return data

    async def pull_optional(self, peer: str, block: bytes) -> Optional[bytes]:
        pool = self.pools[peer]
        ch = await pool.acquire_channel()  # clean: near miss, the handler discards it, which lowers the count
        try:
            data = await ch.request(block)
        except Disconnected:
            pool.discard_channel(ch)
            return None
        pool.release_channel(ch)
        return data

    async def pull_any(self, block: bytes) -> bytes:
        for peer, pool in self.pools.items():
            ch = await pool.acquire_channel()  # leak: the else-less handler goes on to the next peer with this one held
            try:
                data = await ch.request(block)
                pool.release_channel(ch)
                return data
            except Disconnected:
                continue
        raise Disconnected("all peers")

    async def pull_blocks(self, peer: str, blocks: List[bytes]) -> List[bytes]:
        pool = self.pools[peer]
        out: List[bytes] = []
        ch = await pool.acquire_channel()  # clean: finally
        try:
            for b in blocks:
                if not b:
                    break
                out.append(await ch.request(b))
            return out
        finally:
            pool.release_channel(ch)

    async def bind(self, request_id: str, peer: str) -> None:
        if request_id in self.bound:
            return
        self.bound[request_id] = await self.pools[peer].acquire_channel()  # clean: unbind() hands it in

    async def rebind(self, request_id: str, peer: str) -> None:
        old = self.bound.pop(request_id, None)
        if old is not None:
            self.pools[old.peer].release_channel(old)
        self.bound[request_id] = await self.pools[peer].acquire_channel()  # clean: near miss, the former channel was handed in before

    async def unbind(self, request_id: str) -> None:
        ch = self.bound.pop(request_id, None)
        if ch is None:
            return
        self.pools[ch.peer].release_channel(ch)

    async def broadcast(self, payload: bytes) -> int:
        held = []
        for pool in self.pools.values():
            held.append((pool, await pool.acquire_channel()))  # clean: near miss, dead channels are discarded and live ones released
        acks = 0
        for pool, ch in held:
            if not ch.alive:
                pool.discard_channel(ch)
                continue
            await ch.request(payload)
            acks += 1
            pool.release_channel(ch)
        return acks

    async def broadcast_quorum(self, payload: bytes, quorum: int) -> bool:
        held = []
        for pool in self.pools.values():
            held.append((pool, await pool.acquire_channel()))  # leak: after the quorum the remaining channels are not released
        acks = 0
        for pool, ch in held:
            await ch.request(payload)
            pool.release_channel(ch)
            acks += 1
            if acks >= quorum:
                return True
        return False

    async def probe(self, peer: str) -> bool:
        ch = await self.pools[peer].acquire_channel()  # leak: a live channel is reported and kept
        if ch.alive:
            return True
        self.pools[peer].discard_channel(ch)
        return False
