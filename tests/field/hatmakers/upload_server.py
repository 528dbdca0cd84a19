"""Upload endpoint: slots bound the number of parallel uploads, bodies are spooled to disk and then committed."""
from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import AsyncIterator, BinaryIO, Optional

log = logging.getLogger("uploads")


class UploadSlots:
    """Counts uploads in flight; a waiter sleeps until somebody leaves."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._changed = asyncio.Event()

    async def enter(self) -> int:
        while self.inside >= self.limit:
            self._changed.clear()
            await self._changed.wait()
        self.inside += 1
        return self.inside

    def enter_nowait(self) -> bool:
        if self.inside >= self.limit:
            return False
        self.inside += 1
        return True

    def leave(self) -> None:
        self.inside -= 1
        self._changed.set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        number = await self.enter()  # clean: left in finally
        try:
            yield number
        finally:
            self.leave()


@dataclass
class Upload:
    name: str
    size: int
    body: asyncio.StreamReader
    digest: str = ""


@dataclass
class Session:
    ident: str
    spool: BinaryIO
    received: int = 0


class UploadServer:
    def __init__(self, root: str, slots: UploadSlots, max_size: int = 1 << 30) -> None:
        self.root = root
        self.slots = slots
        self.max_size = max_size
        self._sessions: dict[str, Session] = {}
        self._known: set[str] = set()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, os.path.basename(name))

    async def accept(self, upload: Upload) -> tuple[int, str]:
        await self.slots.enter()  # leak: the too-large answer returns without leaving the slot
        if upload.size > self.max_size:
            log.info("%s: %d bytes refused", upload.name, upload.size)
            return 413, "too large"
        await self._store(upload)
        self.slots.leave()
        return 201, upload.digest

    async def accept_bounded(self, upload: Upload) -> tuple[int, str]:
        async with self.slots.slot():  # clean: context manager leaves on every return
            if upload.size > self.max_size:
                return 413, "too large"
            if upload.digest in self._known:
                return 200, upload.digest
            await self._store(upload)
            return 201, upload.digest

    async def accept_or_busy(self, upload: Upload) -> tuple[int, str]:
        if not self.slots.enter_nowait():  # clean: near miss, on failure nothing is held, else left in finally
            return 503, "busy"
        try:
            await self._store(upload)
            if upload.digest in self._known:
                return 200, upload.digest
            self._known.add(upload.digest)
            return 201, upload.digest
        finally:
            self.slots.leave()

    async def accept_detached(self, upload: Upload) -> tuple[int, str]:
        if not self.slots.enter_nowait():  # clean: near miss, the done callback of the task leaves the slot
            return 503, "busy"
        task = asyncio.ensure_future(self._store(upload))
        task.add_done_callback(lambda _: self.slots.leave())
        return 202, upload.name

    async def accept_first(self, uploads: list[Upload]) -> Optional[str]:
        for upload in uploads:
            if not self.slots.enter_nowait():  # leak: break after the first stored one keeps the slot
                break
            await self._store(upload)
            if upload.digest not in self._known:
                self._known.add(upload.digest)
                break
            self.slots.leave()
        return uploads[0].digest if uploads else None

    async def _store(self, upload: Upload) -> None:
        target = self._path(upload.name)
        digest = hashlib.sha256()
        out = open(target + ".part", "wb")  # clean: closed in finally
        try:
            while chunk := await upload.body.read(65536):
                digest.update(chunk)
                out.write(chunk)
        finally:
            out.close()
        upload.digest = digest.hexdigest()
        os.replace(target + ".part", target)

    def verify(self, name: str, expected: str) -> bool:
        stream = open(self._path(name), "rb")  # leak: an empty file returns before close
        head = stream.read(65536)
        if not head:
            log.warning("%s is empty", name)
            return False
        digest = hashlib.sha256(head)
        while chunk := stream.read(65536):
            digest.update(chunk)
        stream.close()
        return digest.hexdigest() == expected

    # resumable sessions ------------------------------------------------------------------------------------
    def _open_spool(self, ident: str) -> BinaryIO:
        return open(os.path.join(tempfile.gettempdir(), f"spool-{ident}"), "w+b")  # clean: handed to the caller

    def begin(self, ident: str) -> bool:
        if ident in self._sessions:
            return False
        spool = self._open_spool(ident)  # clean: near miss, commit() and expire() close it
        self._sessions[ident] = Session(ident, spool)
        return True

    def append(self, ident: str, data: bytes) -> int:
        session = self._sessions[ident]
        session.spool.write(data)
        session.received += len(data)
        return session.received

    def commit(self, ident: str, name: str) -> str:
        session = self._sessions.pop(ident)
        session.spool.seek(0)
        with session.spool:
            data = session.spool.read()
        with open(self._path(name), "wb") as target:  # clean: with statement
            target.write(data)
        return hashlib.sha256(data).hexdigest()

    def expire(self, keep: set[str]) -> int:
        gone = [ident for ident in self._sessions if ident not in keep]
        for ident in gone:
            self._sessions.pop(ident).spool.close()
        return len(gone)

    def measure(self, ident: str, data: bytes) -> int:
        """How many bytes the spool file really takes for data."""
        spool = self._open_spool(ident + "-probe")  # leak: size is returned, the file stays open
        spool.write(data)
        spool.flush()
        return os.fstat(spool.fileno()).st_size


class ThrottledMirror:
    """Copies committed files to a second root, at most one slot per file."""

    def __init__(self, slots: UploadSlots, source: str, target: str) -> None:
        self.slots = slots
        self.source = source
        self.target = target
        self.copied = 0
        self._inflight: dict[str, asyncio.Task] = {}

    async def _copy(self, name: str) -> None:
        with open(os.path.join(self.source, name), "rb") as src:  # clean: with statement
            with open(os.path.join(self.target, name), "wb") as dst:  # clean: with statement
                while chunk := src.read(1 << 20):
                    dst.write(chunk)
                    await asyncio.sleep(0)
        self.copied += 1

    def start(self, name: str) -> bool:
        if name in self._inflight:
            return False
        if not self.slots.enter_nowait():  # clean: near miss, wait() leaves once per task, stop() goes through it
            return False
        self._inflight[name] = asyncio.ensure_future(self._copy(name))
        return True

    async def wait(self, name: str) -> None:
        task = self._inflight.pop(name, None)
        if task is None:
            return
        await asyncio.wait([task])
        self.slots.leave()

    async def stop(self) -> None:
        for name in list(self._inflight):
            self._inflight[name].cancel()
            await self.wait(name)

    async def copy_changed(self, names: list[str], seen: set[str]) -> int:
        count = 0
        for name in names:
            await self.slots.enter()  # leak: a name seen before continues inside the slot
            if name in seen:
                continue
            await self._copy(name)
            seen.add(name)
            self.slots.leave()
            count += 1
        return count
