"""Asynchronous checkpoint writer.

Shards are serialised into aligned blocks and written by a small number of
writer tasks.  `Throttle` limits bytes in flight to the file system.
"""
from __future__ import annotations

import asyncio
import logging
import mmap
import os
import zlib
from collections import deque
from dataclasses import dataclass
from typing import AsyncIterator, Deque, Dict, List, Optional, Sequence, Set

log = logging.getLogger("ckpt")

BLOCK = 8 << 20


class BlockPool:
    """Page-aligned anonymous maps of BLOCK bytes."""

    def __init__(self, count: int) -> None:
        self._idle: Deque[mmap.mmap] = deque(mmap.mmap(-1, BLOCK) for _ in range(count))
        self._cond = asyncio.Condition()

    async def rent(self) -> mmap.mmap:
        async with self._cond:
            while not self._idle:
                await self._cond.wait()
            return self._idle.popleft()  # clean: handed to the caller

    def rent_nowait(self) -> Optional[mmap.mmap]:
        if not self._idle:
            return None
        return self._idle.popleft()  # clean: handed to the caller

    async def restore(self, blk: mmap.mmap) -> None:
        async with self._cond:
            blk.seek(0)
            self._idle.append(blk)
            self._cond.notify()


class Throttle:
    def __init__(self, tokens: int) -> None:
        self._sem = asyncio.Semaphore(tokens)
        self.waiting = 0

    async def enter(self) -> None:
        self.waiting += 1
        try:
            await self._sem.acquire()  # clean: given up by leave()
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self._sem.release()


class WritePermit:
    """async with WritePermit(throttle, path): ..."""

    def __init__(self, throttle: Throttle, path: str) -> None:
        self.throttle = throttle
        self.path = path

    async def __aenter__(self) -> "WritePermit":
        await self.throttle.enter()  # leak: __aexit__ returns before leave() on a FileNotFoundError
        return self

    async def __aexit__(self, et, ev, tb) -> bool:
        if et is FileNotFoundError:
            log.warning("%s vanished", self.path)
            return True
        self.throttle.leave()
        return False


@dataclass
class Piece:
    name: str
    payload: memoryview


class CkptWriter:
    def __init__(self, root: str, pool: BlockPool, throttle: Throttle) -> None:
        self.root = root
        self.pool = pool
        self.throttle = throttle
        self._staged: Dict[str, List[mmap.mmap]] = {}
        self._tasks: Set[asyncio.Task] = set()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    # -- one piece --------------------------------------------------------

    async def write_piece(self, piece: Piece) -> int:
        blk = await self.pool.rent()  # clean: restored in finally
        try:
            n = min(len(piece.payload), BLOCK)
            blk[:n] = piece.payload[:n]
            await self.throttle.enter()  # clean: left in the inner finally
            try:
                await asyncio.to_thread(self._dump, self._path(piece.name), blk, n)
            finally:
                self.throttle.leave()
            return n
        finally:
            await self.pool.restore(blk)

    @staticmethod
    def _dump(path: str, blk: mmap.mmap, n: int) -> None:
        with open(path + ".tmp", "wb") as f:  # clean: closed by with
            f.write(memoryview(blk)[:n])
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)

    async def write_if_changed(self, piece: Piece, last_crc: Dict[str, int]) -> bool:
        blk = await self.pool.rent()  # leak: not restored when the crc is unchanged
        n = min(len(piece.payload), BLOCK)
        blk[:n] = piece.payload[:n]
        crc = zlib.crc32(memoryview(blk)[:n])
        if last_crc.get(piece.name) == crc:
            return False
        await asyncio.to_thread(self._dump, self._path(piece.name), blk, n)
        last_crc[piece.name] = crc
        await self.pool.restore(blk)
        return True

    async def write_with_retry(self, piece: Piece, attempts: int = 3) -> bool:
        n = min(len(piece.payload), BLOCK)
        for i in range(attempts):
            blk = await self.pool.rent()  # leak: an OSError moves on to the next attempt without a restore
            try:
                blk[:n] = piece.payload[:n]
                await asyncio.to_thread(self._dump, self._path(piece.name), blk, n)
            except OSError as e:
                log.info("attempt %d of %s: %s", i, piece.name, e)
                await asyncio.sleep(0.1 * 2**i)
                continue
            await self.pool.restore(blk)
            return True
        return False

    async def append_log(self, name: str, line: bytes) -> None:
        async with WritePermit(self.throttle, name):  # leak: a missing folder raises FileNotFoundError, on which __aexit__ keeps the permit
            fd = os.open(self._path(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # clean: closed in finally
            try:
                os.write(fd, line)
            finally:
                os.close(fd)

    # -- staging ----------------------------------------------------------

    async def stage(self, shard: str, payload: memoryview) -> None:
        blocks = self._staged.setdefault(shard, [])
        for off in range(0, len(payload), BLOCK):
            blk = await self.pool.rent()  # clean: near miss, listed under the shard, which flush() and discard() empty
            part = payload[off : off + BLOCK]
            blk[: len(part)] = part
            blocks.append(blk)

    async def flush(self, shard: str) -> int:
        blocks = self._staged.pop(shard, [])
        try:
            for i, blk in enumerate(blocks):
                await asyncio.to_thread(self._dump, self._path(f"{shard}.{i:05d}"), blk, BLOCK)
        finally:
            for blk in blocks:
                await self.pool.restore(blk)
        return len(blocks)

    async def discard(self, shard: str) -> None:
        for blk in self._staged.pop(shard, []):
            await self.pool.restore(blk)

    def spawn(self, piece: Piece) -> bool:
        blk = self.pool.rent_nowait()  # clean: None when full, else restored by the task that takes it
        if blk is None:
            return False
        n = min(len(piece.payload), BLOCK)
        blk[:n] = piece.payload[:n]
        t = asyncio.ensure_future(self._finish(piece.name, blk, n))
        self._tasks.add(t)
        t.add_done_callback(self._tasks.discard)
        return True

    async def _finish(self, name: str, blk: mmap.mmap, n: int) -> None:
        try:
            await asyncio.to_thread(self._dump, self._path(name), blk, n)
        finally:
            await self.pool.restore(blk)

    async def mirror(self, piece: Piece, other_root: str) -> None:
        await self.throttle.enter()  # leak: not left when both roots are the same folder
        if os.path.realpath(other_root) == os.path.realpath(self.root):
            log.debug("mirror of %s is the root itself", piece.name)
            return
        await asyncio.gather(
            asyncio.to_thread(self._plain, self._path(piece.name), piece.payload),
            asyncio.to_thread(self._plain, os.path.join(other_root, piece.name), piece.payload),
        )
        self.throttle.leave()

    @staticmethod
    def _plain(path: str, payload: memoryview) -> None:
        with open(path, "wb") as f:  # clean: closed by with
            f.write(payload)

    async def join(self) -> None:
        if self._tasks:
            await asyncio.gather(*self._tasks)


async def blocks_of(pool: BlockPool, path: str) -> AsyncIterator[memoryview]:
    """Yields the blocks of a shard; a view is valid until the next step."""
    fd = os.open(path, os.O_RDONLY)  # clean: closed in finally
    try:
        blk = await pool.rent()  # leak: an empty read returns without a restore, which follows only a full loop
        off = 0
        size = os.fstat(fd).st_size
        while off < size:
            got = os.preadv(fd, [blk], off)
            if got == 0:
                log.error("%s truncated at %d", path, off)
                return
            yield memoryview(blk)[:got]
            off += got
        await pool.restore(blk)
    finally:
        os.close(fd)


async def sync_dir(throttle: Throttle, roots: Sequence[str]) -> None:
    for r in roots:
        await throttle.enter()  # leak: continues without leave() for a root that does not exist
        if not os.path.isdir(r):
            continue
        fd = os.open(r, os.O_RDONLY | os.O_DIRECTORY)  # clean: closed in finally
        try:
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)
            throttle.leave()
