"""Sharded checkpoint writer and reader over an object store.

Uploads are multipart: an upload handle, part buffers and a bandwidth permit are leased.
"""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import torch

log = logging.getLogger("ckpt")

PART = 8 << 20


class StoreError(Exception):
    pass


class PartBuffers:
    """Fixed buffers, counted; `obtain` waits, `obtain_now` returns None if all are out."""

    def __init__(self, n: int):
        self._n = n
        self._out = 0
        self._spare: List[bytearray] = []
        self._cv = threading.Condition()

    def _one(self) -> bytearray:
        self._out += 1
        return self._spare.pop() if self._spare else bytearray(PART)  # clean: handed to the caller

    def obtain(self) -> bytearray:
        with self._cv:
            self._cv.wait_for(lambda: self._out < self._n)
            return self._one()  # clean: handed to the caller

    def obtain_now(self) -> Optional[bytearray]:
        with self._cv:
            if self._out >= self._n:
                return None
            return self._one()  # clean: handed to the caller

    def dispose(self, buf: bytearray) -> None:
        with self._cv:
            self._out -= 1
            self._spare.append(buf)
            self._cv.notify()

class MultipartSession:
    """Upload handles of the remote store. Each begin must meet a commit or an abort."""

    def __init__(self, client):
        self.client = client
        self.open_count = 0

    def begin(self, key: str) -> str:
        self.open_count += 1
        return self.client.create_multipart(key)  # clean: handed to the caller

    def part(self, upload: str, idx: int, data: memoryview) -> Optional[str]:
        return self.client.upload_part(upload, idx, bytes(data))

    def commit(self, upload: str, etags: List[str]) -> None:
        self.client.complete(upload, etags)
        self.open_count -= 1

    def abort(self, upload: str) -> None:
        self.client.abort(upload)
        self.open_count -= 1


class Writer:
    def __init__(self, session: MultipartSession, bufs: PartBuffers, lanes: int = 4):
        self.session = session
        self.bufs = bufs
        self.lane = threading.Semaphore(lanes)
        self.pool = ThreadPoolExecutor(lanes)

    # -- serialisation ---------------------------------------------------
    def _parts(self, t: torch.Tensor) -> Iterator[Tuple[bytearray, int]]:
        """Yields (buffer, length); the consumer disposes of the buffer."""
        raw = memoryview(t.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B")
        for off in range(0, len(raw), PART):
            buf = self.bufs.obtain()  # clean: handed to the consumer by yield
            n = min(PART, len(raw) - off)
            buf[:n] = raw[off:off + n]
            yield buf, n

    def _owned_parts(self, t: torch.Tensor) -> Iterator[memoryview]:
        """The same buffer is refilled for each part; it stays ours."""
        raw = memoryview(t.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B")
        buf = self.bufs.obtain()  # clean: near miss, disposed of in the generator's finally
        try:
            for off in range(0, len(raw), PART):
                n = min(PART, len(raw) - off)
                buf[:n] = raw[off:off + n]
                yield memoryview(buf)[:n]
        finally:
            self.bufs.dispose(buf)

    # -- upload ----------------------------------------------------------
    def save_tensor(self, key: str, t: torch.Tensor) -> bool:
        upload = self.session.begin(key)  # clean: near miss, aborted on a refused part, else committed
        etags: List[str] = []
        for i, view in enumerate(self._owned_parts(t)):
            etag = self.session.part(upload, i, view)
            if etag is None:
                self.session.abort(upload)
                return False
            etags.append(etag)
        self.session.commit(upload, etags)
        return True

    def save_fast(self, key: str, t: torch.Tensor) -> bool:
        upload = self.session.begin(key)  # leak: a refused part returns without abort
        etags = []
        for i, (buf, n) in enumerate(self._parts(t)):  # leak: the buffer of a refused part is not disposed of
            etag = self.session.part(upload, i, memoryview(buf)[:n])
            if etag is None:
                log.error("part %d of %s refused", i, key)
                return False
            self.bufs.dispose(buf)
            etags.append(etag)
        self.session.commit(upload, etags)
        return True

    def save_small(self, items: Mapping[str, bytes]) -> int:
        written = 0
        for key, body in items.items():
            buf = self.bufs.obtain()  # leak: an empty body is skipped before dispose
            if not body:
                log.debug("%s is empty", key)
                continue
            buf[:len(body)] = body
            upload = self.session.begin(key)  # clean: committed or aborted on both arms
            etag = self.session.part(upload, 0, memoryview(buf)[:len(body)])
            if etag is None:
                self.session.abort(upload)
            else:
                self.session.commit(upload, [etag])
                written += 1
            self.bufs.dispose(buf)
        return written

    def _send(self, upload: str, idx: int, buf: bytearray, n: int) -> Optional[str]:
        try:
            return self.session.part(upload, idx, memoryview(buf)[:n])
        finally:
            self.bufs.dispose(buf)
            self.lane.release()

    def save_parallel(self, key: str, t: torch.Tensor) -> bool:
        upload = self.session.begin(key)  # clean: committed or aborted once all futures are in
        futs: List[Future] = []
        for i, (buf, n) in enumerate(self._parts(t)):  # clean: near miss, moved into the task, whose finally disposes
            self.lane.acquire()  # clean: near miss, moved into the task, whose finally releases
            futs.append(self.pool.submit(self._send, upload, i, buf, n))
        etags = [f.result() for f in futs]
        if None in etags:
            self.session.abort(upload)
            return False
        self.session.commit(upload, etags)
        return True

    def save_manifest(self, key: str, names: Iterable[str], strict: bool) -> None:
        self.lane.acquire()  # leak: strict mode raises before release
        body = "\n".join(sorted(names)).encode()
        if strict and not body:
            raise StoreError("empty manifest")
        self.session.client.put(key, body)
        self.lane.release()


class Reader:
    def __init__(self, client, bufs: PartBuffers):
        self.client = client
        self.bufs = bufs
        self._ahead: Dict[str, bytearray] = {}

    def read_ahead(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._ahead:
                continue
            buf = self.bufs.obtain_now()  # clean: near miss, disposed of on a failed read, else _ahead holds it until take or close
            if buf is None:
                return
            if self.client.read_part(key, 0, buf) < 0:
                self.bufs.dispose(buf)
                continue
            self._ahead[key] = buf

    def take(self, key: str) -> Optional[bytes]:
        buf = self._ahead.pop(key, None)
        if buf is None:
            return None
        body = bytes(buf)
        self.bufs.dispose(buf)
        return body

    def read_large(self, key: str) -> bytes:
        buf = self.bufs.obtain()  # leak: lost when the first part is full and buf is bound to a new buffer
        n = self.client.read_part(key, 0, buf)
        if n == len(buf):
            buf = self.bufs.obtain()  # clean: disposed of before the return
            n = self.client.read_part(key, 1, buf)
        body = bytes(memoryview(buf)[:max(n, 0)])
        self.bufs.dispose(buf)
        return body

    def close(self) -> None:
        while self._ahead:
            _, buf = self._ahead.popitem()
            self.bufs.dispose(buf)
