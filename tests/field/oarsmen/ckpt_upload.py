"""Uploads training checkpoints to an object store as multipart uploads.

An upload that is begun has to be completed or aborted, otherwise the store bills its parts for ever. The bytes of a
part are copied into one of a few reusable buffers, because the trainer goes on writing into its tensors meanwhile.
"""
import concurrent.futures as cf
import dataclasses
import hashlib
import io
import json
import logging
import queue
import threading
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import numpy as np

LOG = logging.getLogger("ckpt.upload")

PART = 32 << 20
MAX_PARTS = 10_000


class UploadFailed(Exception):
    pass


class TooManyParts(UploadFailed):
    pass


class SlowDown(Exception):
    """The store asks for fewer requests."""


class PartBuffers:
    def __init__(self, count: int, size: int = PART) -> None:
        self._free: "queue.SimpleQueue[bytearray]" = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(bytearray(size))
        self.size = size

    def rent(self, timeout: Optional[float] = None) -> bytearray:
        return self._free.get(timeout=timeout)  # clean: returned

    def hand_back(self, buf: bytearray) -> None:
        self._free.put(buf)


@dataclasses.dataclass
class Upload:
    """An open multipart upload."""

    store: Any
    key: str
    uid: str
    etags: Dict[int, str] = dataclasses.field(default_factory=dict)
    closed: bool = False

    def complete(self) -> str:
        parts = [{"n": n, "etag": e} for n, e in sorted(self.etags.items())]
        location = self.store.complete_multipart(self.key, self.uid, parts)
        self.closed = True
        return location

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.store.abort_multipart(self.key, self.uid)


class Uploader:
    def __init__(self, store: Any, buffers: PartBuffers, threads: int = 4) -> None:
        self.store = store
        self.buffers = buffers
        self.threads = cf.ThreadPoolExecutor(threads, thread_name_prefix="part")
        self.rate = threading.BoundedSemaphore(threads * 2)
        self.sent = 0
        self.open_uploads: Dict[str, Upload] = {}
        self._lock = threading.Lock()

    # parts

    def _put(self, up: Upload, n: int, buf: bytearray, length: int) -> None:
        """Runs on a thread; the buffer is ours from here on."""
        try:
            for attempt in range(5):
                try:
                    up.etags[n] = self.store.put_part(up.key, up.uid, n, memoryview(buf)[:length])
                    break
                except SlowDown:
                    time.sleep(0.2 * 2 ** attempt)
            else:
                raise UploadFailed(f"{up.key}: part {n} was refused five times")
            with self._lock:
                self.sent += length
        finally:
            self.buffers.hand_back(buf)

    def _chunks(self, stream: io.RawIOBase) -> Iterator[Tuple[bytearray, int]]:
        """Buffers filled from the stream. Whoever takes one out of here has to hand it back."""
        while True:
            buf = self.buffers.rent()  # leak: at the end of the stream the last, empty buffer is neither yielded nor handed back
            got = stream.readinto(buf)
            if not got:
                return
            yield buf, got

    def upload(self, key: str, stream: io.RawIOBase) -> str:
        up = Upload(self.store, key, self.store.begin_multipart(key))  # clean: near miss, completed at the end, aborted in the handler that raises again
        futures: List[cf.Future] = []
        try:
            for n, (buf, got) in enumerate(self._chunks(stream), 1):  # clean: near miss, _put() hands every buffer back, also when it fails
                futures.append(self.threads.submit(self._put, up, n, buf, got))
            for f in futures:
                f.result()
            return up.complete()
        except BaseException:
            cf.wait(futures)
            up.abort()
            raise

    def upload_indexed(self, key: str, stream: io.RawIOBase) -> List[str]:
        """One part after the other with a digest of each, for stores without checksums."""
        up = Upload(self.store, key, self.store.begin_multipart(key))  # clean: aborted in the handler or completed
        digests = []
        try:
            for n, (buf, got) in enumerate(self._chunks(stream), 1):  # leak: TooManyParts is raised while this loop has a buffer in its hands
                if n > MAX_PARTS:
                    raise TooManyParts(key)
                digests.append(hashlib.sha256(memoryview(buf)[:got]).hexdigest())
                self._put(up, n, buf, got)
            up.complete()
        except (UploadFailed, SlowDown) as exc:
            LOG.error("%s: %s", key, exc)
            up.abort()
            raise
        return digests

    def upload_small(self, key: str, blob: bytes) -> bool:
        if len(blob) > self.buffers.size:
            return False
        try:
            buf = self.buffers.rent(timeout=5.0)  # clean: handed back in the finally, an Empty has none
        except queue.Empty:
            LOG.info("%s: no buffer in five seconds", key)
            return False
        try:
            buf[:len(blob)] = blob
            self.store.put_object(key, memoryview(buf)[:len(blob)])
        except SlowDown:
            return False
        finally:
            self.buffers.hand_back(buf)
        return True

    # uploads that stay open between training steps

    def resume(self, key: str) -> Upload:
        with self._lock:
            up = self.open_uploads.get(key)
            if up is None or up.closed:
                up = Upload(self.store, key, self.store.begin_multipart(key))  # clean: in the table until seal() or close()
                self.open_uploads[key] = up
            return up

    def append(self, key: str, blob: bytes) -> cf.Future:
        up = self.resume(key)  # clean: the upload belongs to the table, seal() or close() ends it
        buf = self.buffers.rent()  # leak: a blob that is too large raises ValueError after the buffer was rented
        if len(blob) > len(buf):
            raise ValueError(f"{len(blob)} bytes in one append")
        buf[:len(blob)] = blob
        return self.threads.submit(self._put, up, len(up.etags) + 1, buf, len(blob))

    def seal(self, key: str) -> Optional[str]:
        up = self.open_uploads.pop(key, None)
        if up is None:
            return None
        try:
            return up.complete()
        except (UploadFailed, SlowDown):
            up.abort()
            return None

    def copy_parts(self, src: str, dst: str, ranges: Iterable[Tuple[int, int]]) -> bool:
        """Server-side copy, the data does not pass through here."""
        up = Upload(self.store, dst, self.store.begin_multipart(dst))  # leak: a copy that is slowed down returns False, the upload is neither completed nor aborted
        for n, (lo, hi) in enumerate(ranges, 1):
            try:
                up.etags[n] = self.store.copy_part(dst, up.uid, n, src, lo, hi)
            except SlowDown:
                LOG.warning("copy of %s stopped at part %d", src, n)
                return False
        up.complete()
        return True

    # throttled single objects

    def put_async(self, key: str, blob: bytes) -> cf.Future:
        self.rate.acquire()  # clean: near miss, released by the callback, which futures call on every outcome
        fut = self.threads.submit(self.store.put_object, key, blob)
        fut.add_done_callback(lambda _f: self.rate.release())
        return fut

    def put_json(self, key: str, doc: Mapping[str, Any]) -> bool:
        if not self.rate.acquire(timeout=1.0):  # leak: a document that cannot be serialised is answered with False in the handler, the permit is kept
            return False
        try:
            blob = json.dumps(doc).encode()
        except (TypeError, ValueError) as exc:
            LOG.error("%s: %s", key, exc)
            return False
        try:
            self.store.put_object(key, blob)
        finally:
            self.rate.release()
        return True

    def close(self) -> None:
        self.threads.shutdown(wait=True)
        for key in list(self.open_uploads):
            self.open_uploads.pop(key).abort()


def upload_state(uploader: Uploader, prefix: str, state: Mapping[str, np.ndarray]) -> Dict[str, str]:
    where = {}
    for name, arr in state.items():
        raw = io.BytesIO(np.ascontiguousarray(arr).tobytes())
        where[name] = uploader.upload(f"{prefix}/{name}", raw)
    return where


def upload_file(uploader: Uploader, prefix: str, path: str) -> str:
    with open(path, "rb", buffering=0) as fh:  # clean: with
        return uploader.upload(f"{prefix}/{path.rsplit('/', 1)[-1]}", fh)


def publish(uploader: Uploader, prefix: str, state: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> bool:
    t0 = time.perf_counter()
    try:
        where = upload_state(uploader, prefix, state)
    except UploadFailed as exc:
        LOG.error("checkpoint %s is incomplete: %s", prefix, exc)
        return False
    done = uploader.put_json(f"{prefix}/index.json", {**meta, "tensors": where})
    LOG.info("%s: %.1f MB in %.1fs", prefix, uploader.sent / 1e6, time.perf_counter() - t0)
    return done
