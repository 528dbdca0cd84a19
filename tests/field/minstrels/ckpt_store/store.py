"""The part that the trainer sees: put, get, copy, and a background mirror."""
import logging
import os
import threading

from .conn import ConnectionPool, StoreError
from .parts import PART_BYTES, MultipartUpload, PartBuffers

logger = logging.getLogger("ckpt_store")


class CheckpointStore(object):
    def __init__(self, hosts, connections=8, buffers=4):
        self.pool = ConnectionPool(hosts, connections)  # clean: kept on self, close() closes it
        self.buffers = PartBuffers(buffers)
        self.probe = None
        self.mirrors = []

    def put(self, key, path):
        """Uploads a file. Either all of it is in the store afterwards, or nothing."""
        up = MultipartUpload(self.pool, key).begin()  # clean: completed in the try or aborted in the handler
        try:
            self._send_file(up, path)
            up.complete()
        except BaseException:
            up.abort()
            raise

    def _send_file(self, up, path):
        buf = self.buffers.rent()  # clean: one buffer for the whole file, refunded in finally
        try:
            with open(path, "rb") as f:  # clean: with
                number = 0
                while True:
                    n = f.readinto(buf)
                    if not n:
                        return
                    up.send_part(number, memoryview(buf)[:n])
                    number += 1
        finally:
            self.buffers.refund(buf)

    def put_if_fits(self, key, chunks, limit):
        """Uploads an iterator of byte strings. False when it turned out to be larger than the limit."""
        up = MultipartUpload(self.pool, key).begin()  # leak: over the limit the upload is neither completed nor aborted
        total = 0
        for number, chunk in enumerate(chunks):
            total += len(chunk)
            if total > limit:
                logger.error("%s is larger than %d bytes", key, limit)
                return False
            up.send_part(number, chunk)
        up.complete()
        return True

    def get(self, key, path, size):
        """Downloads in ranges into a temporary file, which takes the name at the end."""
        conn = self.pool.get()  # clean: near miss, replaced after an error only once the old one was put back
        tmp = path + ".part"
        f = open(tmp, "wb")  # clean: closed in finally
        try:
            for off in range(0, size, PART_BYTES):
                rng = "/%s?from=%d&to=%d" % (key, off, min(size, off + PART_BYTES))
                try:
                    _, data = conn.request("GET", rng)
                except OSError:
                    conn.good = False
                    self.pool.put(conn)
                    conn = None
                    conn = self.pool.get()  # clean: near miss, conn again, the finally puts it back, None if get raised
                    _, data = conn.request("GET", rng)
                f.write(data)
        finally:
            f.close()
            if conn is not None:
                self.pool.put(conn)
        os.replace(tmp, path)

    def reachable(self):
        """Keeps one connection aside, so that the check works when all others are busy."""
        if self.probe is None:
            self.probe = self.pool.get()  # leak: close() forgets the probe
        try:
            self.probe.request("HEAD", "/")
        except (OSError, StoreError):
            return False
        return True

    def mirror(self, keys, other):
        t = Mirror(self, other, keys)
        self.mirrors.append(t)
        t.start()
        return t

    def close(self):
        for t in self.mirrors:
            t.join()
        self.pool.close()


class Mirror(threading.Thread):
    """Copies keys to another store, small objects only."""

    def __init__(self, src, dst, keys):
        super(Mirror, self).__init__(daemon=True)
        self.src, self.dst, self.keys = src, dst, keys
        self.missing = []

    def run(self):
        for key in self.keys:
            buf = self.src.buffers.rent(timeout=60)  # leak: an object that is too large, or an error in the handler, takes the buffer away
            if buf is None:
                self.missing.append(key)
                continue
            try:
                n = self.read(key, buf)
                if n > PART_BYTES:
                    continue
                up = MultipartUpload(self.dst.pool, key).begin()  # leak: StoreError of a part is handled below without abort
                up.send_part(0, memoryview(buf)[:n])
                up.complete()
            except StoreError as e:
                logger.warning("mirror of %s: %s", key, e)
                self.missing.append(key)
                continue
            self.src.buffers.refund(buf)

    def read(self, key, buf):
        conn = self.src.pool.get()  # clean: put back in finally
        try:
            _, data = conn.request("GET", "/" + key)
            buf[:len(data)] = data
            return len(data)
        finally:
            self.src.pool.put(conn)
