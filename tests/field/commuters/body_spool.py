"""Spools large request bodies (images, documents) to disk before they are forwarded."""
from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Iterable, Optional

log = logging.getLogger("spool")


@dataclass
class Upload:
    request_id: str
    mime: str
    file: Optional[BinaryIO] = None
    parts: list[BinaryIO] = field(default_factory=list)
    size: int = 0

    def discard(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        for p in self.parts:
            p.close()
        self.parts.clear()


class DiskQuota:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def book(self, amount: int) -> bool:
        if self.used + amount > self.limit:
            return False
        self.used += amount  # clean: booked on behalf of the caller
        return True

    def unbook(self, amount: int) -> None:
        self.used -= amount


class Spooler:
    def __init__(self, folder: Path, quota: DiskQuota, max_part: int) -> None:
        self.folder = folder
        self.quota = quota
        self.max_part = max_part
        self.uploads: dict[str, Upload] = {}

    def _new_file(self) -> BinaryIO:
        return open(self.folder / os.urandom(8).hex(), "w+b")  # clean: the caller's

    def receive(self, request_id: str, mime: str, chunks: Iterable[bytes]) -> Optional[Upload]:
        if request_id in self.uploads:
            return None
        fh = self._new_file()  # leak: above the part limit None is returned with the file open
        up = Upload(request_id, mime)
        for chunk in chunks:
            up.size += len(chunk)
            if up.size > self.max_part:
                return None
            fh.write(chunk)
        fh.seek(0)
        up.file = fh
        self.uploads[request_id] = up
        return up

    def receive_parts(self, request_id: str, parts: Iterable[bytes]) -> Optional[Upload]:
        if request_id in self.uploads:
            return None
        up = Upload(request_id, "multipart/mixed")
        for body in parts:
            fh = self._new_file()  # clean: near miss, it is among the parts before the limit discards them all
            up.parts.append(fh)
            up.size += fh.write(body)
            if up.size > self.max_part:
                up.discard()
                return None
        self.uploads[request_id] = up
        return up

    def booked_receive(self, request_id: str, body: bytes) -> bool:
        if not self.quota.book(len(body)):  # leak: a known request id returns without unbooking
            return False
        if request_id in self.uploads:
            return False
        fh = self._new_file()  # clean: the upload's, finish discards it
        fh.write(body)
        self.uploads[request_id] = Upload(request_id, "application/octet-stream", fh, size=len(body))
        return True

    def finish_booked(self, request_id: str) -> None:
        up = self.uploads.pop(request_id, None)
        if up is not None:
            self.quota.unbook(up.size)
            up.discard()

    def replace(self, request_id: str, body: bytes) -> int:
        up = self.uploads[request_id]
        up.file = self._new_file()  # leak: the upload's open file is overwritten
        up.size = up.file.write(body)
        return up.size

    def append_part(self, request_id: str, body: bytes) -> int:
        up = self.uploads[request_id]
        fh = self._new_file()  # clean: near miss, an empty part is closed and not kept
        n = fh.write(body)
        if n == 0:
            fh.close()
            return 0
        up.parts.append(fh)
        return n

    def finish(self, request_id: str) -> None:
        up = self.uploads.pop(request_id, None)
        if up is not None:
            up.discard()


def checksum_fd(path: Path) -> Optional[int]:
    fd = os.open(path, os.O_RDONLY)  # leak: an empty file returns None before os.close
    data = os.read(fd, 1 << 20)
    if not data:
        return None
    os.close(fd)
    return sum(data) & 0xFFFFFFFF


def atomic_write(path: Path, body: bytes) -> bool:
    fd, tmp = tempfile.mkstemp(dir=path.parent)  # clean: near miss, fdopen takes the descriptor over and closes it
    with os.fdopen(fd, "wb") as out:  # clean: with statement
        out.write(body)
    if os.path.getsize(tmp) != len(body):
        os.unlink(tmp)
        return False
    os.replace(tmp, path)
    return True


def sniff(paths: list[Path]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for path in paths:
        fh = open(path, "rb")  # clean: near miss, closed before the unknown ones continue
        head = fh.read(8)
        fh.close()
        if head.startswith(b"\x89PNG"):
            kinds[path.name] = "png"
            continue
        if not head.startswith(b"%PDF"):
            continue
        kinds[path.name] = "pdf"
    return kinds
