from __future__ import annotations

from typing import Awaitable, Callable, Dict, List, Optional, Tuple

from .staging import StagingBuffer, StagingPool, staged

Fetch = Callable[[str], Awaitable[Optional[bytes]]]


class Receiver:
    def __init__(self, pool: StagingPool, fetch: Fetch) -> None:
        self.pool = pool
        self.fetch = fetch
        self.ready: Dict[str, StagingBuffer] = {}
        self.early: List[Tuple[str, StagingBuffer]] = []

    async def _fetch_into(self, key: str) -> Optional[StagingBuffer]:
        buf = await self.pool.checkout_buffer()  # clean: near miss, checked in for a miss, else handed to the caller
        payload = await self.fetch(key)
        if payload is None:
            self.pool.checkin_buffer(buf)
            return None
        buf.load(payload)
        return buf

    async def receive(self, key: str) -> bool:
        buf = await self._fetch_into(key)  # clean: ready owns it, consume checks in
        if buf is None:
            return False
        former = self.ready.pop(key, None)
        if former is not None:
            self.pool.checkin_buffer(former)
        self.ready[key] = buf
        return True

    def consume(self, key: str) -> bytes:
        buf = self.ready.pop(key)
        data = buf.bytes()
        self.pool.checkin_buffer(buf)
        return data

    async def receive_all(self, keys: List[str]) -> List[bytes]:
        out: List[bytes] = []
        for key in keys:
            buf = await self._fetch_into(key)  # leak: break on an empty payload leaves the buffer out
            if buf is None:
                continue
            if buf.filled == 0:
                break
            out.append(buf.bytes())
            self.pool.checkin_buffer(buf)
        return out

    async def peek(self, key: str) -> int:
        buf = await self._fetch_into(key)  # leak: the size is returned and the buffer forgotten
        return buf.filled if buf is not None else -1

    async def peek_prefix(self, key: str, n: int) -> bytes:
        buf = await self._fetch_into(key)  # clean: checked in unless it is None
        if buf is None:
            return b""
        head = buf.bytes()[:n]
        self.pool.checkin_buffer(buf)
        return head

    async def receive_early(self, key: str, payload: bytes) -> None:
        buf = await staged(self.pool, payload)  # leak: settle() pops entries of other keys and drops their buffers
        self.early.append((key, buf))

    def settle(self, key: str) -> Optional[bytes]:
        """Takes the oldest early payload of ``key`` out of the list."""
        while self.early:
            k, buf = self.early.pop(0)
            if k != key:
                continue
            data = buf.bytes()
            self.pool.checkin_buffer(buf)
            return data
        return None
