"""Multipart uploads of checkpoints to an object store.

An upload that was begun has to be finished or aborted, otherwise its parts are
billed until somebody looks at the bucket.
"""
import concurrent.futures
import contextlib
import functools
import http.client
import json
import logging
import os
import threading
import time

log = logging.getLogger(__name__)

PART = 16 << 20


class UploadFailed(Exception):
    pass


class NotThere(Exception):
    pass


class ConnPool:
    def __init__(self, host, limit=8, max_age=60.0):
        self.host = host
        self.max_age = max_age
        self._permits = threading.Semaphore(limit)
        self._idle = []
        self._lock = threading.Lock()

    def get(self):
        self._permits.acquire()  # clean: near miss, released by put() or drop() of the connection that goes with it
        with self._lock:
            while self._idle:
                conn, since = self._idle.pop()  # clean: an old one is closed, a young one is returned
                if time.monotonic() - since < self.max_age:
                    return conn
                conn.close()
        return http.client.HTTPSConnection(self.host, timeout=30)  # clean: returned to the caller

    def put(self, conn):
        with self._lock:
            self._idle.append((conn, time.monotonic()))
        self._permits.release()

    def drop(self, conn):
        conn.close()
        self._permits.release()


class Buffers:
    def __init__(self, count):
        self._free = [bytearray(PART) for _ in range(count)]
        self._cond = threading.Condition()

    def borrow(self):
        with self._cond:
            self._cond.wait_for(lambda: self._free)
            return self._free.pop()  # clean: returned to the caller

    def restore(self, buf):
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


def request(pool, method, path, body=None, tries=4):
    """Body of the answer. Connections that broke are dropped and the request repeated."""
    for attempt in range(tries):
        conn = pool.get()  # clean: put or dropped in each branch
        try:
            conn.request(method, path, body)
            answer = conn.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            log.info("%s %s: %r", method, path, exc)
            pool.drop(conn)
            time.sleep(0.2 * 2 ** attempt)
            continue
        pool.put(conn)
        if answer.status == 404:
            raise NotThere(path)
        if answer.status < 300:
            return data
    raise UploadFailed("%s %s gave up" % (method, path))


class Store:
    def __init__(self, host, bucket):
        self.pool = ConnPool(host)
        self.bucket = bucket

    def begin(self, key):
        answer = request(self.pool, "POST", "/%s/%s?uploads" % (self.bucket, key))  # clean: the upload is returned to the caller
        return key, json.loads(answer)["id"]

    def part(self, upload, number, data):
        key, uid = upload
        path = "/%s/%s?partNumber=%d&uploadId=%s" % (self.bucket, key, number, uid)
        return json.loads(request(self.pool, "PUT", path, data))["etag"]

    def finish(self, upload, etags):
        key, uid = upload
        request(self.pool, "POST", "/%s/%s?uploadId=%s" % (self.bucket, key, uid), json.dumps(etags))

    def abort(self, upload):
        key, uid = upload
        with contextlib.suppress(UploadFailed, NotThere):
            request(self.pool, "DELETE", "/%s/%s?uploadId=%s" % (self.bucket, key, uid))

    def head(self, key):
        conn = self.pool.get()  # leak: an answer other than 200 returns None with the connection out
        conn.request("HEAD", "/%s/%s" % (self.bucket, key))
        answer = conn.getresponse()
        answer.read()
        if answer.status != 200:
            return None
        self.pool.put(conn)
        return int(answer.headers["Content-Length"])


def chunks(path):
    with open(path, "rb") as f:  # clean: closed by the with statement
        while True:
            data = f.read(PART)
            if not data:
                return
            yield data


def upload_file(store, path, key):
    upload = store.begin(key)  # leak: part() raises UploadFailed when its tries are used up, and nobody aborts
    etags = []
    for number, data in enumerate(chunks(path), 1):
        etags.append(store.part(upload, number, data))
    store.finish(upload, etags)
    return len(etags)


class Upload:
    """with Upload(store, key) as up: up.write(...). Aborted when the body raises."""

    def __init__(self, store, key):
        self.store = store
        self.upload = store.begin(key)  # clean: __exit__ finishes or aborts it
        self.etags = []

    def __enter__(self):
        return self

    def write(self, data):
        self.etags.append(self.store.part(self.upload, len(self.etags) + 1, data))

    def __exit__(self, kind, exc, tb):
        if kind is not None:
            self.store.abort(self.upload)
            return False
        try:
            self.store.finish(self.upload, self.etags)
        except (UploadFailed, NotThere):
            self.store.abort(self.upload)
            raise


def upload_tensors(store, key, tensors):
    with Upload(store, key) as up:  # clean: the with statement finishes or aborts it
        for name, tensor in tensors.items():
            up.write(name.encode() + b"\0" + tensor.numpy().tobytes())


def upload_tree(store, root):
    """All files of a checkpoint appear together or not at all."""
    with contextlib.ExitStack() as stack:
        ready = []
        for name in sorted(os.listdir(root)):
            upload = store.begin(name)  # leak: the stack is emptied first, and finish() of a later file may raise UploadFailed
            stack.callback(store.abort, upload)
            etags = [store.part(upload, i, data) for i, data in enumerate(chunks(os.path.join(root, name)), 1)]
            ready.append((upload, etags))
        stack.pop_all()
        for upload, etags in ready:
            store.finish(upload, etags)


def upload_marker(store, key):
    with contextlib.ExitStack() as stack:
        upload = store.begin(key)  # clean: near miss, the stack lets go only after finish()
        stack.callback(store.abort, upload)
        store.finish(upload, [store.part(upload, 1, b"complete\n")])
        stack.pop_all()


def upload_parallel(store, path, key, buffers, workers=4):
    """Reads ahead while the parts before are on their way."""
    size = os.path.getsize(path)
    futures = []
    with Upload(store, key) as up, open(path, "rb", buffering=0) as f:  # clean: both end with the with statement
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for number in range(1, -(-size // PART) + 1):
                buf = buffers.borrow()  # leak: the lambda looks buf up late and may restore the one of a later round
                count = f.readinto(buf)
                fut = pool.submit(store.part, up.upload, number, memoryview(buf)[:count])
                fut.add_done_callback(lambda _: buffers.restore(buf))
                futures.append(fut)
        up.etags = [fut.result() for fut in futures]


def checksum_parallel(path, buffers, digest, workers=4):
    """digest(memoryview) for each part, in order."""
    size = os.path.getsize(path)
    futures = []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, open(path, "rb", buffering=0) as f:  # clean: closed by the with statement
        for _ in range(-(-size // PART)):
            buf = buffers.borrow()  # clean: near miss, each callback is bound to its own buffer
            count = f.readinto(buf)
            fut = pool.submit(digest, memoryview(buf)[:count])
            fut.add_done_callback(lambda _, done=functools.partial(buffers.restore, buf): done())
            futures.append(fut)
    return [fut.result() for fut in futures]


class Resumable:
    """Uploads that go on after a preemption; one entry per checkpoint name."""

    def __init__(self, store, max_open=4):
        self.store = store
        self.max_open = max_open
        self.open = {}

    def advance(self, key, data):
        if key not in self.open:
            self._limit()
            self.open[key] = (self.store.begin(key), [])  # leak: _limit() deletes the oldest entry without aborting it
        upload, etags = self.open[key]
        etags.append(self.store.part(upload, len(etags) + 1, data))

    def _limit(self):
        while len(self.open) >= self.max_open:
            oldest = next(iter(self.open))
            log.warning("giving up %s", oldest)
            del self.open[oldest]

    def done(self, key):
        upload, etags = self.open.pop(key)
        try:
            self.store.finish(upload, etags)
        except (UploadFailed, NotThere):
            self.store.abort(upload)
            raise

    def close(self):
        for upload, _ in self.open.values():
            self.store.abort(upload)
        self.open.clear()
