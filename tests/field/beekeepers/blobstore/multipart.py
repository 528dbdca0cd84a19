"""Multipart uploads: parts are gathered until completion or abort."""
from __future__ import annotations

import hashlib
import itertools
import logging
from typing import Optional

from .budget import Grant, MemoryBudget, PartArena, PartBuffer

log = logging.getLogger("blob.multipart")


class Upload:
    def __init__(self, ident: str, key: str, grant: Grant) -> None:
        self.ident = ident
        self.key = key
        self.grant = grant
        self.parts: dict[int, PartBuffer] = {}
        self.etags: list[str] = []


class MultipartTable:
    def __init__(self, arena: PartArena, budget: MemoryBudget, backend) -> None:
        self.arena = arena
        self.budget = budget
        self.backend = backend
        self.uploads: dict[str, Upload] = {}
        self._next = itertools.count(1)

    def initiate(self, key: str) -> Optional[str]:
        grant = self.budget.request(4096)  # clean: near miss, lives in the Upload, _drop repays it
        if grant is None:
            return None
        ident = "%s-%d" % (key, next(self._next))
        self.uploads[ident] = Upload(ident, key, grant)
        return ident

    async def put_part(self, ident: str, number: int, body) -> Optional[str]:
        upload = self.uploads.get(ident)
        if upload is None:
            return None
        buffer = await self.arena.lend_wait()  # leak: a part sent twice overwrites the first buffer
        async for piece in body:
            buffer.data[buffer.fill : buffer.fill + len(piece)] = piece
            buffer.fill += len(piece)
        buffer.number = number
        upload.parts[number] = buffer
        etag = hashlib.md5(buffer.data[: buffer.fill]).hexdigest()
        upload.etags.append(etag)
        return etag

    def copy_part(self, ident: str, number: int, source: str) -> bool:
        upload = self.uploads.get(ident)
        if upload is None:
            return False
        buffer = self.arena.lend()  # clean: near miss, the former part is restored before it is replaced
        if buffer is None:
            return False
        buffer.fill = self.backend.read_into(source, buffer.data)
        buffer.number = number
        former = upload.parts.pop(number, None)
        if former is not None:
            self.arena.restore(former)
        upload.parts[number] = buffer
        return True

    def complete(self, ident: str) -> bool:
        upload = self.uploads.pop(ident, None)
        if upload is None:
            return False
        for number in sorted(upload.parts):
            buffer = upload.parts[number]
            self.backend.append(upload.key, bytes(buffer.data[: buffer.fill]))
        self._drop(upload)
        return True

    def abort(self, ident: str) -> bool:
        upload = self.uploads.pop(ident, None)
        if upload is None:
            return False
        self._drop(upload)
        return True

    def _drop(self, upload: Upload) -> None:
        for buffer in upload.parts.values():
            self.arena.restore(buffer)
        upload.parts.clear()
        self.budget.repay(upload.grant)


class ResumableTable:
    """Single-stream uploads that may pause between chunks."""

    def __init__(self, arena: PartArena, backend) -> None:
        self.arena = arena
        self.backend = backend
        self.open: dict[str, PartBuffer] = {}
        self.stale: dict[str, PartBuffer] = {}

    def begin(self, key: str) -> bool:
        if key in self.open:
            return False
        buffer = self.arena.lend()  # leak: expire() parks it in stale and purge() drops it there
        if buffer is None:
            return False
        self.open[key] = buffer
        return True

    def chunk(self, key: str, data: bytes) -> None:
        buffer = self.open[key]
        buffer.data[buffer.fill : buffer.fill + len(data)] = data
        buffer.fill += len(data)

    def finish(self, key: str) -> None:
        buffer = self.open.pop(key)
        self.backend.append(key, bytes(buffer.data[: buffer.fill]))
        self.arena.restore(buffer)

    def expire(self, key: str) -> None:
        self.stale[key] = self.open.pop(key)

    def resume(self, key: str) -> bool:
        if key not in self.stale:
            return False
        self.open[key] = self.stale.pop(key)
        return True

    def purge(self) -> int:
        count = len(self.stale)
        self.stale.clear()
        return count
