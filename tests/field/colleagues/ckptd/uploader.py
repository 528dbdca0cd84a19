"""Upload of checkpoint parts; a chunk moves into its task and out again."""
from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field
from typing import AsyncIterator, BinaryIO, Optional

from .chunks import Chunks, MeteredChunks

@dataclass
class Part:
    no: int
    buf: bytearray
    n: int
    borrowed: bool = False

@dataclass
class Upload:
    key: str
    parts: dict[int, Part] = field(default_factory=dict)
    etags: list[str] = field(default_factory=list)

class Uploader:
    def __init__(self, chunks: Chunks, put) -> None:
        self.chunks, self.put = chunks, put
        self.live: set[asyncio.Task] = set()
        self.open: dict[str, Upload] = {}

    async def _ship(self, key: str, part: Part) -> str:
        try:
            return await self.put(key, part.no, memoryview(part.buf)[: part.n])
        finally:
            if not part.borrowed:
                self.chunks.repay(part.buf)

    async def upload(self, key: str, src: BinaryIO) -> int:
        no = 0
        while True:
            buf = await self.chunks.rent()  # clean: near miss, EOF repays; otherwise _ship repays
            n = src.readinto(buf)
            if not n:
                self.chunks.repay(buf)
                break
            task = asyncio.create_task(self._ship(key, Part(no, buf, n)))
            self.live.add(task)
            task.add_done_callback(self.live.discard)
            no += 1
        await asyncio.gather(*self.live)
        return no

    async def upload_serial(self, key: str, src: BinaryIO) -> int:
        no = 0
        while True:
            buf = await self.chunks.rent()  # leak: EOF breaks with the last chunk rented
            n = src.readinto(buf)
            if not n:
                break
            await self._ship(key, Part(no, buf, n))
            no += 1
        return no
    async def upload_inplace(self, key: str, blob: bytes) -> int:
        """One chunk for all parts: borrowed by each part, ours to repay."""
        buf = await self.chunks.rent()  # clean: near miss, parts are borrowed so it is repaid here
        src, no = io.BytesIO(blob), 0
        while n := src.readinto(buf):
            await self._ship(key, Part(no, buf, n, borrowed=True))
            no += 1
        self.chunks.repay(buf)
        return no
    async def upload_header(self, key: str, head: bytes) -> str:
        buf = await self.chunks.rent()  # leak: part says borrowed, so nobody repays
        buf[: len(head)] = head
        return await self._ship(key, Part(0, buf, len(head), borrowed=True))
    async def stage(self, key: str, no: int, data: bytes) -> None:
        up = self.open.setdefault(key, Upload(key))
        if no in up.parts:
            self.chunks.repay(up.parts.pop(no).buf)
        buf = await self.chunks.rent()  # clean: near miss, commit() ships or abort() repays
        buf[: len(data)] = data
        up.parts[no] = Part(no, buf, len(data))
    async def commit(self, key: str) -> list[str]:
        up = self.open.pop(key)
        for no in sorted(up.parts):
            up.etags.append(await self._ship(key, up.parts[no]))
        return up.etags
    def abort(self, key: str) -> None:
        up = self.open.pop(key, None)
        if up is None:
            return
        for part in up.parts.values():
            self.chunks.repay(part.buf)

async def blocks(pool: MeteredChunks, src: BinaryIO) -> AsyncIterator[Part]:
    """Parts of src; whoever iterates repays."""
    no = 0
    while (buf := await pool.rent_idle()) is not None:  # leak: end of file returns with buf rented
        n = src.readinto(buf)
        if not n:
            return
        yield Part(no, buf, n)
        no += 1

async def crc(pool: MeteredChunks, src: BinaryIO) -> Optional[int]:
    total = 0
    buf = await pool.rent_within(1.0)  # clean: repaid after the loop, None means no chunk
    if buf is None:
        return None
    while n := src.readinto(buf):
        total ^= hash(bytes(buf[:n]))
    pool.repay(buf)
    return total
