from __future__ import annotations

import asyncio
import dataclasses
import secrets


@dataclasses.dataclass
class Lease:
    token: str
    node: str
    blocks: int
    expires: float


class LeaseTable:
    """Decode-side KV room promised to a prefill in progress."""

    def __init__(self, blocks_per_node: dict[str, int]) -> None:
        self._room = dict(blocks_per_node)
        self.live: dict[str, Lease] = {}

    def issue(self, node: str, blocks: int, ttl: float = 30.0) -> Lease | None:
        if self._room.get(node, 0) < blocks:
            return None
        self._room[node] -= blocks
        lease = Lease(secrets.token_hex(8), node, blocks, asyncio.get_running_loop().time() + ttl)
        self.live[lease.token] = lease
        return lease

    def renew(self, lease: Lease, ttl: float) -> None:
        lease.expires = asyncio.get_running_loop().time() + ttl

    def retire(self, lease: Lease) -> None:
        if self.live.pop(lease.token, None) is not None:
            self._room[lease.node] += lease.blocks


class RoomNumbers:
    def __init__(self, n: int) -> None:
        self._q: asyncio.Queue[int] = asyncio.Queue()
        for i in range(n):
            self._q.put_nowait(i)

    async def draw(self) -> int:
        return await self._q.get()

    def draw_nowait(self) -> int | None:
        try:
            return self._q.get_nowait()
        except asyncio.QueueEmpty:
            return None

    async def draw_for(self, seconds: float) -> int | None:
        try:
            return await asyncio.wait_for(self.draw(), seconds)  # clean: passed on to the caller
        except asyncio.TimeoutError:
            return None

    def hand_in(self, room: int) -> None:
        self._q.put_nowait(room)
