"""Multipart upload of checkpoint shards to an S3-like store.

Part buffers are preallocated; the uploader blocks when the network is slower
than the producer.
"""
from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from contextlib import contextmanager

log = logging.getLogger(__name__)

PART_SIZE = 8 << 20


class StoreError(Exception):
    pass


class PartBuffer:
    __slots__ = ("data", "length", "index")

    def __init__(self, index: int, size: int):
        self.index = index
        self.data = bytearray(size)
        self.length = 0

    def view(self) -> memoryview:
        return memoryview(self.data)[: self.length]


class PartBufferPool:
    def __init__(self, count: int, size: int = PART_SIZE):
        self._cond = threading.Condition()
        self._idle = deque(PartBuffer(i, size) for i in range(count))
        self.count = count

    def checkout(self, timeout: float | None = None) -> PartBuffer | None:
        with self._cond:
            if not self._cond.wait_for(lambda: len(self._idle) > 0, timeout):
                return None
            buf = self._idle.popleft()  # clean: returned to the caller
            buf.length = 0
            return buf

    def checkin(self, buf: PartBuffer) -> None:
        with self._cond:
            buf.length = 0
            self._idle.append(buf)
            self._cond.notify()

    @contextmanager
    def part(self):
        buf = self.checkout()  # clean: checked in by the finally
        try:
            yield buf
        finally:
            self.checkin(buf)


class MultipartClient:
    """Thin client. Every initiated upload has to be completed or aborted."""

    def __init__(self, transport, bucket: str):
        self._t = transport
        self.bucket = bucket

    def initiate(self, key: str) -> str:
        return self._t.post(f"/{self.bucket}/{key}?uploads")["UploadId"]

    def put_part(self, upload_id: str, number: int, body) -> str:
        status, etag = self._t.put(f"?partNumber={number}&uploadId={upload_id}", body)
        if status >= 500:
            raise StoreError(f"part {number}: {status}")
        return etag

    def complete(self, upload_id: str, etags: list[str]) -> str:
        return self._t.post(f"?uploadId={upload_id}", etags)["Location"]

    def abort(self, upload_id: str) -> None:
        self._t.delete(f"?uploadId={upload_id}")

    def head(self, key: str) -> dict | None:
        return self._t.head(f"/{self.bucket}/{key}")

    def read_range(self, key: str, offset: int, buf: PartBuffer) -> int:
        buf.length = self._t.get_into(f"/{self.bucket}/{key}", offset, buf.data)
        return buf.length


class ShardUploader:
    def __init__(self, client: MultipartClient, pool: PartBufferPool):
        self.client = client
        self.pool = pool
        self._ready: dict[str, PartBuffer] = {}

    def upload_stream(self, key: str, reader) -> str | None:
        upload_id = self.client.initiate(key)  # leak: an empty stream returns without complete or abort
        etags: list[str] = []
        number = 1
        while True:
            buf = self.pool.checkout()  # clean: checked in before the break and by the finally
            buf.length = reader.readinto(buf.data)
            if buf.length == 0:
                self.pool.checkin(buf)
                break
            try:
                etags.append(self.client.put_part(upload_id, number, buf.view()))
            except StoreError:
                self.client.abort(upload_id)
                raise
            finally:
                self.pool.checkin(buf)
            number += 1
        if not etags:
            log.warning("nothing to upload for %s", key)
            return None
        return self.client.complete(upload_id, etags)

    def upload_bytes(self, key: str, payload: bytes) -> str:
        upload_id = self.client.initiate(key)  # clean: completed, or aborted by the handler
        etags: list[str] = []
        try:
            for number, start in enumerate(range(0, len(payload), PART_SIZE), 1):
                buf = self.pool.checkout(timeout=30.0)  # leak: handler aborts the upload but never checks in the failed part's buffer
                if buf is None:
                    raise StoreError("no part buffer in 30s")
                chunk = payload[start:start + PART_SIZE]
                buf.data[: len(chunk)] = chunk
                buf.length = len(chunk)
                etags.append(self.client.put_part(upload_id, number, buf.view()))
                self.pool.checkin(buf)
        except StoreError:
            self.client.abort(upload_id)
            raise
        return self.client.complete(upload_id, etags)

    def mirror(self, key: str, sink) -> bool:
        head = self.pool.checkout(timeout=5.0)  # leak: not checked in when the second checkout times out
        if head is None:
            return False
        body = self.pool.checkout(timeout=5.0)  # clean: None-checked, then checked in by the finally
        if body is None:
            log.info("mirror of %s postponed", key)
            return False
        try:
            n = self.client.read_range(key, 0, head)
            self.client.read_range(key, n, body)
            sink.write(head.view())
            sink.write(body.view())
        finally:
            self.pool.checkin(head)
            self.pool.checkin(body)
        return True

    def prefetch(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._ready:
                continue
            buf = self.pool.checkout(timeout=1.0)  # clean: near miss, moved into self._ready, which pop_ready and close empty
            if buf is None:
                return
            self.client.read_range(key, 0, buf)
            self._ready[key] = buf

    def pop_ready(self, key: str) -> bytes | None:
        buf = self._ready.pop(key, None)
        if buf is None:
            return None
        data = bytes(buf.view())
        self.pool.checkin(buf)
        return data

    def digest(self, key: str) -> str:
        sha = hashlib.sha256()
        offset = 0
        with self.pool.part() as buf:  # clean: with block
            while True:
                n = self.client.read_range(key, offset, buf)
                if n == 0:
                    return sha.hexdigest()
                sha.update(buf.view())
                offset += n

    def quick_digest(self, key: str, size: int) -> str:
        """First and last part only."""
        sha = hashlib.sha256()
        buf = self.pool.checkout()  # leak: name is rebound for objects larger than one part
        self.client.read_range(key, 0, buf)
        sha.update(buf.view())
        if size > PART_SIZE:
            buf = self.pool.checkout()  # clean: checked in below
            self.client.read_range(key, size - PART_SIZE, buf)
            sha.update(buf.view())
        self.pool.checkin(buf)
        return sha.hexdigest()

    def scrub(self, keys: list[str], expected: dict[str, str]) -> list[str]:
        bad = []
        for key in keys:
            buf = self.pool.checkout()  # leak: continue for keys without an expected digest skips the checkin
            n = self.client.read_range(key, 0, buf)
            want = expected.get(key)
            if want is None:
                log.debug("%s has no digest (%d bytes)", key, n)
                continue
            if hashlib.sha256(buf.view()).hexdigest() != want:
                bad.append(key)
            self.pool.checkin(buf)
        return bad

    def close(self) -> None:
        while self._ready:
            _, buf = self._ready.popitem()
            self.pool.checkin(buf)
