"""Multipart uploads staged in temporary files before they are sealed."""
from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass, field
from typing import BinaryIO

log = logging.getLogger("uploads")


class StagingFiles:
    """Opens staging files and keeps account of the bytes promised to uploads."""

    def __init__(self, root: str, budget: int) -> None:
        self._root = root
        self._budget = budget
        self.open_count = 0

    def open_part(self, name: str) -> BinaryIO:
        handle = open(os.path.join(self._root, name), "w+b")  # clean: handed to the caller
        self.open_count += 1
        return handle

    def close_part(self, handle: BinaryIO) -> None:
        handle.close()
        self.open_count -= 1

    def promise(self, size: int) -> int:
        """Sets bytes aside and gives the number, 0 when there is no room."""
        if size > self._budget:
            return 0
        self._budget -= size  # clean: the bytes belong to the caller
        return size

    def unpromise(self, size: int) -> None:
        self._budget += size


@dataclass
class Upload:
    upload_id: str
    size: int
    promised: int = 0
    parts: dict[int, BinaryIO] = field(default_factory=dict)
    manifest: BinaryIO | None = None


class Uploads:
    def __init__(self, staging: StagingFiles) -> None:
        self._staging = staging
        self._uploads: dict[str, Upload] = {}

    def begin(self, upload_id: str, size: int) -> Upload | None:
        promised = self._staging.promise(size)  # leak: a known upload is returned and the new promise forgotten
        if not promised:
            return None
        known = self._uploads.get(upload_id)
        if known is not None:
            return known
        upload = Upload(upload_id, size, promised)
        self._uploads[upload_id] = upload
        return upload

    def extend(self, upload_id: str, extra: int) -> bool:
        promised = self._staging.promise(extra)  # clean: near miss, an unknown upload gives it back, else it is added up
        upload = self._uploads.get(upload_id)
        if upload is None:
            self._staging.unpromise(promised)
            return False
        upload.promised += promised
        return promised > 0

    def put_part(self, upload: Upload, number: int, data: bytes) -> str:
        handle = self._staging.open_part(f"{upload.upload_id}.{number}")  # leak: a part sent again replaces an open handle
        handle.write(data)
        upload.parts[number] = handle
        return hashlib.md5(data).hexdigest()

    def put_part_once(self, upload: Upload, number: int, data: bytes) -> str:
        handle = upload.parts.get(number)
        if handle is None:
            handle = self._staging.open_part(f"{upload.upload_id}.{number}")  # clean: near miss, opened only where the table has none
            upload.parts[number] = handle
        handle.seek(0)
        handle.truncate()
        handle.write(data)
        return hashlib.md5(data).hexdigest()

    def start_manifest(self, upload: Upload) -> None:
        if upload.manifest is None:
            upload.manifest = self._staging.open_part(f"{upload.upload_id}.manifest")  # leak: abort closes the parts and not the manifest
        upload.manifest.write(upload.upload_id.encode() + b"\n")

    def seal(self, upload_id: str, target: str) -> int:
        upload = self._uploads.pop(upload_id, None)
        if upload is None:
            return 0
        written = 0
        with open(target, "wb") as out:  # clean: with
            for number in sorted(upload.parts):
                handle = upload.parts.pop(number)
                handle.seek(0)
                written += out.write(handle.read())
                self._staging.close_part(handle)
        if upload.manifest is not None:
            self._staging.close_part(upload.manifest)
            upload.manifest = None
        self._staging.unpromise(upload.promised)
        return written

    def abort(self, upload_id: str) -> None:
        upload = self._uploads.pop(upload_id, None)
        if upload is None:
            return
        for handle in upload.parts.values():
            self._staging.close_part(handle)
        upload.parts.clear()
        self._staging.unpromise(upload.promised)


class Verifier:
    def __init__(self, staging: StagingFiles) -> None:
        self._staging = staging

    def checksum(self, path: str, limit: int) -> str | None:
        source = open(path, "rb")  # leak: a file over the limit returns without close
        size = os.fstat(source.fileno()).st_size
        if size > limit:
            log.info("%s: %d bytes, not checked", path, size)
            return None
        digest = hashlib.sha256(source.read()).hexdigest()
        source.close()
        return digest

    def compare(self, left: str, right: str) -> bool:
        a = open(left, "rb")  # clean: closed by the outer finally
        try:
            b = open(right, "rb")  # clean: near miss, the quick answer leaves through both finallys
            try:
                if os.fstat(a.fileno()).st_size != os.fstat(b.fileno()).st_size:
                    return False
                return a.read() == b.read()
            finally:
                b.close()
        finally:
            a.close()

    def spool(self, chunks: list[bytes]) -> bytes:
        spool = tempfile.TemporaryFile()  # leak: only the digest of the spooled bytes goes back, the file stays open
        for chunk in chunks:
            spool.write(chunk)
        spool.seek(0)
        return hashlib.sha256(spool.read()).digest()

    def scratch_copy(self, data: bytes) -> int:
        handle = self._staging.open_part("scratch")  # clean: near miss, closed on the empty path and at the end
        if not data:
            self._staging.close_part(handle)
            return 0
        count = handle.write(data)
        self._staging.close_part(handle)
        return count
