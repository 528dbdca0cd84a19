"""Multipart dataset upload: spool files, part slots and quotas."""
from __future__ import annotations

import hashlib
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import BinaryIO, Iterable, Optional

log = logging.getLogger(__name__)


class Quota:
    """Bytes that the uploads in progress may occupy on the spool disk."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._charged = 0
        self._mu = threading.Lock()

    def charge(self, nbytes: int) -> bool:
        with self._mu:
            if self._charged + nbytes > self._limit:
                return False
            self._charged += nbytes
            return True

    def credit(self, nbytes: int) -> None:
        with self._mu:
            self._charged -= nbytes


@dataclass
class PartSlot:
    number: int
    busy: bool = False
    upload_id: str = ""


class SlotTable:
    """Numbered slots for the parts that are on the wire."""

    def __init__(self, count: int) -> None:
        self._slots = [PartSlot(i) for i in range(count)]
        self._mu = threading.Lock()

    def allocate(self, upload_id: str) -> Optional[PartSlot]:
        with self._mu:
            for slot in self._slots:
                if not slot.busy:
                    slot.busy = True
                    slot.upload_id = upload_id
                    return slot
        return None

    def free(self, slot: PartSlot) -> None:
        with self._mu:
            slot.busy = False
            slot.upload_id = ""

    def free_upload(self, upload_id: str) -> int:
        """Free whatever an upload still holds."""
        n = 0
        with self._mu:
            for slot in self._slots:
                if slot.busy and slot.upload_id == upload_id:
                    slot.busy = False
                    n += 1
        return n


@dataclass
class Upload:
    upload_id: str
    spool: BinaryIO
    size: int
    received: int = 0
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)


class UploadService:
    def __init__(self, root: str, quota: Quota, slots: SlotTable) -> None:
        self.root = root
        self.quota = quota
        self.slots = slots
        self._uploads: dict[str, Upload] = {}
        self.sealed: dict[str, str] = {}

    def _path(self, upload_id: str) -> str:
        return os.path.join(self.root, upload_id + ".part")

    def create(self, upload_id: str, size: int) -> bool:
        if upload_id in self._uploads:
            return False
        if not self.quota.charge(size):  # leak: abort() closes the file but never credits the size
            return False
        spool = open(self._path(upload_id), "w+b")  # clean: near miss, closed by seal() and abort()
        self._uploads[upload_id] = Upload(upload_id, spool, size)
        return True

    def put_part(self, upload_id: str, offset: int, data: bytes) -> bool:
        up = self._uploads[upload_id]
        slot = self.slots.allocate(upload_id)  # leak: a part beyond the declared size returns without free
        if slot is None:
            return False
        if offset + len(data) > up.size:
            log.warning("part of %s exceeds the declared size", upload_id)
            return False
        up.spool.seek(offset)
        up.received += up.spool.write(data)
        self.slots.free(slot)
        return True

    def append(self, upload_id: str, data: bytes) -> int:
        up = self._uploads[upload_id]
        slot = self.slots.allocate(upload_id)  # clean: freed in the finally
        if slot is None:
            return -1
        try:
            up.spool.seek(0, os.SEEK_END)
            n = up.spool.write(data)
            up.digest.update(data)
            up.received += n
            return n
        finally:
            self.slots.free(slot)

    def seal(self, upload_id: str) -> str:
        up = self._uploads.pop(upload_id)
        up.spool.close()
        self.quota.credit(up.size)
        self.sealed[upload_id] = up.digest.hexdigest()
        return self.sealed[upload_id]

    def abort(self, upload_id: str) -> None:
        up = self._uploads.pop(upload_id)
        up.spool.close()
        os.unlink(self._path(upload_id))
        log.info("upload %s aborted after %d bytes", upload_id, up.received)

    def import_file(self, upload_id: str, source: str) -> Optional[str]:
        size = os.path.getsize(source)
        if not self.quota.charge(size):  # clean: credited on both ways
            return None
        src = open(source, "rb")  # clean: closed on both ways
        digest = hashlib.sha256()
        while True:
            chunk = src.read(1 << 16)
            if not chunk:
                break
            digest.update(chunk)
        if digest.hexdigest() in self.sealed.values():
            src.close()
            self.quota.credit(size)
            return None
        src.close()
        self.quota.credit(size)
        self.sealed[upload_id] = digest.hexdigest()
        return upload_id

    def same_content(self, a: str, b: str) -> bool:
        left = open(a, "rb")  # leak: the first difference returns with both files open
        right = open(b, "rb")  # leak: the first difference returns with both files open
        while True:
            x, y = left.read(1 << 16), right.read(1 << 16)
            if x != y:
                return False
            if not x:
                break
        left.close()
        right.close()
        return True

    def concat(self, target: str, parts: Iterable[str]) -> int:
        total = 0
        out = open(target, "wb")  # clean: closed at the end
        for path in parts:
            if not os.path.exists(path):
                continue
            src = open(path, "rb")  # leak: an empty part is skipped before the close
            data = src.read()
            if not data:
                continue
            total += out.write(data)
            src.close()
        out.close()
        return total

    def parallel_parts(self, upload_id: str, parts: list[bytes]) -> int:
        """Reserve as many slots as possible, write the parts in turn, free the slots."""
        taken: list[PartSlot] = []
        batch_id = upload_id + "/batch"
        for _ in parts:
            slot = self.slots.allocate(batch_id)  # clean: near miss, freed by free_upload()
            if slot is None:
                break
            taken.append(slot)
        up = self._uploads[upload_id]
        for slot, data in zip(taken, parts):
            up.spool.seek(slot.number * len(data))
            up.received += up.spool.write(data)
        return self.slots.free_upload(batch_id)


class SpoolWriter:
    """Writes through one file, rolls to the next one after `roll` bytes."""

    def __init__(self, base: str, roll: int) -> None:
        self._base = base
        self._roll = roll
        self._index = 0
        self._written = 0
        self._fh = open(f"{base}.0", "wb")  # leak: _next() replaces the file without closing it

    def write(self, data: bytes) -> None:
        if self._written + len(data) > self._roll:
            self._next()
        self._written += self._fh.write(data)

    def _next(self) -> None:
        self._fh.flush()
        self._index += 1
        self._written = 0
        self._fh = open(f"{self._base}.{self._index}", "wb")  # leak: the following roll replaces it

    def close(self) -> None:
        self._fh.close()


class IndexWriter:
    """Same life for the index, one file for each day."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._day = ""
        self._fh: Optional[BinaryIO] = None

    def add(self, day: str, line: bytes) -> None:
        if day != self._day:
            self.close()
            self._day = day
            self._fh = open(os.path.join(self._root, day), "ab")  # clean: near miss, close() before the next
        self._fh.write(line + b"\n")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


def write_index(root: str, entries: list[tuple[str, bytes]]) -> int:
    writer = IndexWriter(root)  # clean: closed at the end
    for day, line in entries:
        writer.add(day, line)
    writer.close()
    return len(entries)


def spool_all(base: str, blocks: list[bytes], dry_run: bool) -> int:
    total = sum(len(b) for b in blocks)
    if dry_run:
        return total
    writer = SpoolWriter(base, 1 << 20)  # clean: closed in the finally
    try:
        for block in blocks:
            writer.write(block)
    finally:
        writer.close()
    return total
