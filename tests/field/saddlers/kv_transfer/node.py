from __future__ import annotations

import asyncio
from typing import Dict, Optional

from .receiver import Receiver
from .sender import Link, Sender
from .staging import StagingPool, drain_all, staged


class TransferNode:
    """One endpoint: sends finished prefills and receives KV for decode."""

    def __init__(self, name: str, buffers: int = 4, nbytes: int = 64) -> None:
        self.name = name
        self.pool = StagingPool(buffers, nbytes)
        self.links: Dict[str, Link] = {}
        self.store: Dict[str, bytes] = {}
        self.sender = Sender(self.pool, self.links)
        self.receiver = Receiver(self.pool, self._fetch)

    def connect(self, peer: str) -> Link:
        self.links[peer] = Link(peer)
        return self.links[peer]

    async def _fetch(self, key: str) -> Optional[bytes]:
        await asyncio.sleep(0)
        return self.store.get(key)

    async def loopback(self, payload: bytes, verify: bool) -> bool:
        buf = await staged(self.pool, payload)  # leak: checked in only under verify
        ok = True
        if verify:
            ok = buf.bytes() == payload
            self.pool.checkin_buffer(buf)
        return ok

    async def checksum(self, payload: bytes, local: bool) -> int:
        buf = None
        if not local:
            buf = await staged(self.pool, payload)  # clean: near miss, given back under the same flag
        total = sum(payload) if local else sum(buf.bytes())
        if not local:
            self.pool.checkin_buffer(buf)
        return total

    async def quiesce(self) -> int:
        await self.sender.flush()
        self.sender.abort()
        buffers = await drain_all(self.pool)  # clean: each buffer of the list is checked in
        for buf in buffers:
            self.pool.checkin_buffer(buf)
        return len(buffers)


async def demo() -> None:
    node = TransferNode("p0")
    node.connect("d0")
    node.store["k"] = b"kkk"
    assert await node.sender.send("d0", b"abc")
    assert await node.sender.send_layers("d0", [b"a", b"b"]) == 2
    await node.sender.broadcast(b"x")
    await node.sender.post("d0", b"y")
    await node.sender.post_if_open("d0", b"z")
    seq = await node.sender.send_acked("d0", b"q")
    node.sender.ack(seq)
    assert await node.receiver.receive("k") and node.receiver.consume("k") == b"kkk"
    assert await node.receiver.receive_all(["k", "none"]) == [b"kkk"]
    await node.receiver.peek_prefix("k", 2)
    await node.receiver.receive_early("e", b"e")
    assert node.receiver.settle("e") == b"e"
    await node.loopback(b"abc", True)
    assert await node.checksum(b"\1\2", False) == 3
    assert await node.quiesce() == 4


if __name__ == "__main__":
    asyncio.run(demo())
