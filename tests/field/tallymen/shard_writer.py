"""Writes and uploads checkpoint shards."""
import contextlib
import io
import logging
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

logger = logging.getLogger("ckpt")

SHARD_BYTES = 1 << 28


class Transient(Exception):
    pass


class Denied(Exception):
    pass


class Permits:
    """At most n uploads; the number tells the remote which lane to use."""

    def __init__(self, n):
        self._sem = threading.Semaphore(n)
        self._lanes = list(range(n))
        self._mu = threading.Lock()

    def get(self):
        self._sem.acquire()  # clean: released by put()
        with self._mu:
            return self._lanes.pop()  # clean: handed to the caller

    def get_nowait(self):
        if not self._sem.acquire(blocking=False):  # clean: near miss, nothing is taken when it is False
            return None
        with self._mu:
            return self._lanes.pop()  # clean: handed to the caller

    def put(self, lane):
        with self._mu:
            self._lanes.append(lane)
        self._sem.release()


class BufferPool:
    def __init__(self, limit):
        self._spare = []
        self._limit = limit
        self._cv = threading.Condition()
        self._out = 0

    def lend(self):
        with self._cv:
            while self._out >= self._limit:
                self._cv.wait()
            self._out += 1
            return self._spare.pop() if self._spare else io.BytesIO()  # clean: handed to the caller

    def back(self, buf):
        buf.seek(0)
        buf.truncate()
        with self._cv:
            self._out -= 1
            self._spare.append(buf)
            self._cv.notify()


def encode(pool, tensors):
    """(buffer, bytes) with the pickled tensors; the caller gives the buffer back."""
    buf = pool.lend()  # clean: returned
    for name, t in tensors.items():
        pickle.dump((name, t), buf, protocol=5)
    return buf, buf.tell()


class Remote:
    def __init__(self, client, permits):
        self.client = client
        self.permits = permits

    def upload(self, key, data, tries=4):
        lane = self.permits.get()  # leak: not put back when all tries were used up
        for attempt in range(tries):
            try:
                self.client.put(key, data, lane)
            except Transient:
                logger.info("%s: try %d failed", key, attempt)
                time.sleep(2 ** attempt)
                continue
            except Denied:
                self.permits.put(lane)
                raise
            self.permits.put(lane)
            return True
        return False

    def delete(self, keys):
        lane = self.permits.get_nowait()  # clean: None has nothing to put back
        if lane is None:
            return False
        try:
            for k in keys:
                self.client.delete(k, lane)
        except (Transient, Denied):
            return False
        finally:
            self.permits.put(lane)
        return True

    def exists(self, key):
        lane = self.permits.get()  # clean: put back in the finally
        try:
            return self.client.head(key, lane)
        finally:
            self.permits.put(lane)


class ShardFile:
    """Local shards, numbered; a new one begins when one is full."""

    def __init__(self, prefix):
        self.prefix = prefix
        self.number = -1
        self.fh = None
        self._next()

    def _next(self):
        self.number += 1
        self.fh = open(f"{self.prefix}-{self.number:05d}.bin", "wb")  # leak: the file of the full shard is overwritten and never closed

    def write(self, data):
        if self.fh.tell() + len(data) > SHARD_BYTES:
            self.fh.flush()
            self._next()
        self.fh.write(data)

    def close(self):
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class Saver:
    def __init__(self, pool, remote, workers=4):
        self.pool = pool
        self.remote = remote
        self.executor = ThreadPoolExecutor(workers)
        self.known = {}

    def save(self, key, tensors):
        with contextlib.ExitStack() as stack:
            buf, n = encode(self.pool, tensors)  # clean: the stack gives it back
            stack.callback(self.pool.back, buf)
            if n == 0:
                return False
            return self.remote.upload(key, bytes(buf.getbuffer()))

    def save_changed(self, key, tensors, digest):
        with contextlib.ExitStack() as stack:
            buf, n = encode(self.pool, tensors)  # leak: pop_all() for an unchanged shard empties the stack, its result is dropped
            stack.callback(self.pool.back, buf)
            if self.known.get(key) == digest(buf.getvalue()):
                stack.pop_all()
                logger.debug("%s is unchanged", key)
                return False
            self.known[key] = digest(buf.getvalue())
            return self.remote.upload(key, buf.getvalue())

    def save_later(self, key, tensors):
        with contextlib.ExitStack() as stack:
            buf, n = encode(self.pool, tensors)  # clean: near miss, pop_all() moves the callback to the job, which closes the stack
            stack.callback(self.pool.back, buf)
            if n == 0:
                return None
            moved = stack.pop_all()
        return self.executor.submit(self._upload_job, key, buf, moved)

    def _upload_job(self, key, buf, stack):
        with stack:
            return self.remote.upload(key, buf.getvalue())

    def save_local(self, prefix, parts):
        out = ShardFile(prefix)  # clean: closed in the finally
        try:
            for tensors in parts:
                buf, n = encode(self.pool, tensors)  # leak: empty parts are skipped with the buffer
                if n == 0:
                    continue
                out.write(buf.getvalue())
                self.pool.back(buf)
        finally:
            out.close()

    def save_all(self, parts):
        futures = {}
        for key, tensors in parts.items():
            buf, n = encode(self.pool, tensors)  # clean: near miss, given back below for every future, done or failed
            futures[self.executor.submit(self.remote.upload, key, buf.getvalue())] = (key, buf)
        bad = []
        for fut in as_completed(futures):
            key, buf = futures[fut]
            self.pool.back(buf)
            if fut.exception() is not None or not fut.result():
                bad.append(key)
        return bad

    def mirror(self, key, path):
        """A local copy of what is uploaded, unless the disk has it."""
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # leak: Denied from the upload is handled before the close
        except FileExistsError:
            return False
        buf = self.pool.lend()  # clean: near miss, given back in the finally, also when Denied is handled
        try:
            self.remote.client.fetch(key, buf)
            self.remote.upload(key + ".mirror", buf.getvalue())
            os.write(fd, buf.getvalue())
        except Denied:
            os.unlink(path)
            return False
        finally:
            self.pool.back(buf)
        os.close(fd)
        return True
