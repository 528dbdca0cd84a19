from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .permits import ByteBudget


@dataclass(eq=False)
class Media:
    kind: str
    data: bytes
    reserved: int


class MediaLoader:
    def __init__(self, budget: ByteBudget, max_bytes: int, timeout: float = 5.0) -> None:
        self.budget = budget
        self.max_bytes = max_bytes
        self.timeout = timeout

    async def _download(self, host: str, path: str) -> bytes | None:
        reader, writer = await asyncio.open_connection(host, 80)  # leak: an answer other than 200 returns without closing the writer
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        status = await reader.readline()
        if b" 200 " not in status:
            return None
        body = await reader.read()
        writer.close()
        await writer.wait_closed()
        return body

    async def load(self, kind: str, host: str, path: str, size: int) -> Media | None:
        if size > self.max_bytes:
            return None
        await self.budget.reserve(size)  # clean: near miss, refunded on a timeout and on a missing body, else carried by the Media
        try:
            data = await asyncio.wait_for(self._download(host, path), self.timeout)
        except (asyncio.TimeoutError, OSError):
            self.budget.refund(size)
            return None
        except asyncio.CancelledError:
            self.budget.refund(size)
            raise
        if data is None:
            self.budget.refund(size)
            return None
        return Media(kind, data, size)

    def inline(self, kind: str, raw: bytes) -> Media | None:
        if not self.budget.try_reserve(len(raw)):  # leak: an empty or foreign payload returns None without refund
            return None
        if not raw.startswith((b"\x89PNG", b"\xff\xd8", b"RIFF")):
            return None
        return Media(kind, raw, len(raw))

    def dispose(self, media: Media) -> None:
        self.budget.refund(media.reserved)
        media.reserved = 0
