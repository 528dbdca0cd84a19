"""Checkpoints to an object store: multipart uploads out of a bounded set of buffers."""
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("ckpt.upload")

PART = 8 << 20


class StoreError(Exception):
    pass


class Transient(StoreError):
    pass


class Starved(StoreError):
    pass


class PartPool:
    """At most `limit` buffers exist, most of them are used again."""

    def __init__(self, limit):
        self._permits = threading.Semaphore(limit)
        self._spare = []
        self._lock = threading.Lock()

    def take(self, timeout=60.0):
        if not self._permits.acquire(timeout=timeout):  # clean: False took nothing, otherwise give() releases it
            raise Starved("no part buffer")
        with self._lock:
            if self._spare:
                return self._spare.pop()  # clean: returned
        return bytearray(PART)

    def give(self, buf):
        with self._lock:
            self._spare.append(buf)
        self._permits.release()

    @contextmanager
    def part(self):
        buf = self.take()  # clean: finally
        try:
            yield memoryview(buf)
        finally:
            self.give(buf)


@dataclass
class Upload:
    key: str
    id: str
    etags: dict = field(default_factory=dict)


class Store:
    def __init__(self, session, bucket):
        self._session = session
        self._bucket = bucket
        self.open_uploads = 0

    def _check(self, reply):
        if reply.status in (429, 503):
            raise Transient(reply.reason)
        if reply.status >= 400:
            raise StoreError(reply.reason)
        return reply

    def begin(self, key):
        reply = self._check(self._session.post(f"/{self._bucket}/{key}?uploads"))
        self.open_uploads += 1
        return Upload(key, reply.text)

    def put_part(self, upload, number, data):
        url = f"/{self._bucket}/{upload.key}?partNumber={number}&uploadId={upload.id}"
        upload.etags[number] = self._check(self._session.put(url, data)).headers["etag"]

    def complete(self, upload):
        self.open_uploads -= 1
        self._session.post(f"/{self._bucket}/{upload.key}?uploadId={upload.id}", upload.etags)

    def abort(self, upload):
        self.open_uploads -= 1
        self._session.delete(f"/{self._bucket}/{upload.key}?uploadId={upload.id}")

    def read_into(self, key, view):
        data = self._check(self._session.get(f"/{self._bucket}/{key}")).body
        view[: len(data)] = data
        return len(data)


class Uploader:
    def __init__(self, store, pool, threads=8):
        self._store = store
        self._pool = pool
        self._executor = ThreadPoolExecutor(threads)

    def _send(self, upload, number, buf, size):
        try:
            self._store.put_part(upload, number, memoryview(buf)[:size])
        finally:
            self._pool.give(buf)

    def file(self, path, key):
        upload = self._store.begin(key)  # clean: near miss, completed at the end, aborted by the handler for every StoreError
        futures = []
        try:
            with open(path, "rb") as fh:  # clean: context manager
                while True:
                    buf = self._pool.take()  # clean: near miss, an empty read gives it back, otherwise _send() does in its thread
                    size = fh.readinto(buf)
                    if size == 0:
                        self._pool.give(buf)
                        break
                    futures.append(self._executor.submit(self._send, upload, len(futures) + 1, buf, size))
            wait(futures)
            for future in futures:
                future.result()
        except StoreError:
            wait(futures)
            self._store.abort(upload)
            raise
        self._store.complete(upload)
        return upload.etags

    def blob(self, data, key):
        upload = self._store.begin(key)  # leak: empty data returns with the upload begun
        if not data:
            return None
        try:
            self._store.put_part(upload, 1, data)
        except StoreError:
            self._store.abort(upload)
            raise
        self._store.complete(upload)
        return upload.etags[1]

    def blob_with_retry(self, data, key, attempts=5):
        for attempt in range(attempts):
            upload = self._store.begin(key)  # leak: a transient error begins another upload and does not abort this one
            try:
                self._store.put_part(upload, 1, data)
            except Transient as exc:
                log.info("%s, attempt %d: %s", key, attempt, exc)
                time.sleep(2.0**attempt)
                continue
            except StoreError:
                self._store.abort(upload)
                raise
            self._store.complete(upload)
            return True
        return False


class MultipartWriter:
    """Collects writes of any size into parts."""

    def __init__(self, store, pool, key):
        self._store = store
        self._pool = pool
        self._upload = store.begin(key)  # clean: close() completes it and abort() aborts it
        self._buf = None
        self._fill = 0
        self._number = 0

    def write(self, data):
        view = memoryview(data)
        while view:
            if self._buf is None:
                self._buf = self._pool.take()  # leak: abort() cancels the upload and forgets the buffer
                self._fill = 0
            n = min(len(view), PART - self._fill)
            self._buf[self._fill : self._fill + n] = view[:n]
            self._fill += n
            view = view[n:]
            if self._fill == PART:
                self._flush()

    def _flush(self):
        self._number += 1
        try:
            self._store.put_part(self._upload, self._number, self._buf[: self._fill])
        finally:
            buf, self._buf = self._buf, None
            self._pool.give(buf)

    def close(self):
        if self._upload is None:
            return
        try:
            if self._buf is not None:
                self._flush()
        except StoreError:
            self.abort()
            raise
        self._store.complete(self._upload)
        self._upload = None

    def abort(self):
        if self._upload is not None:
            self._store.abort(self._upload)
            self._upload = None


def save(tensors, store, pool, key, cancelled):
    writer = MultipartWriter(store, pool, key)  # clean: closed, or aborted on either way out
    try:
        for tensor in tensors:
            if cancelled.is_set():
                writer.abort()
                return False
            writer.write(tensor.numpy().tobytes())
    except StoreError:
        writer.abort()
        raise
    writer.close()
    return True


def mirror(here, there, key, data):
    near = here.begin(key)  # leak: begin() at the other store raises StoreError and this upload stays open
    far = there.begin(key)  # clean: completed, or aborted by the handler
    try:
        here.put_part(near, 1, data)
        there.put_part(far, 1, data)
    except StoreError:
        here.abort(near)
        there.abort(far)
        raise
    here.complete(near)
    there.complete(far)


def compose(store, pool, keys, sink):
    total = 0
    for key in keys:
        buf = pool.take()  # leak: an empty object goes on to the next key with the buffer taken
        try:
            size = store.read_into(key, buf)
        except StoreError:
            pool.give(buf)
            raise
        if size == 0:
            continue
        sink(memoryview(buf)[:size])
        total += size
        pool.give(buf)
    return total


def same(store, pool, a, b):
    with pool.part() as left, pool.part() as right:  # clean: context managers
        return store.read_into(a, left) == store.read_into(b, right) and left == right
