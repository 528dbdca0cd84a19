"""Part buffers and multipart uploads."""
import hashlib
import json
import logging
import queue

from .conn import StoreError

logger = logging.getLogger("ckpt_store.parts")

PART_BYTES = 16 << 20


class PartBuffers(object):
    """A few reusable buffers of the size of one part."""

    def __init__(self, count):
        self._free = queue.LifoQueue()
        for _ in range(count):
            self._free.put(bytearray(PART_BYTES))

    def rent(self, timeout=None):
        """A buffer, or None when none has come back within the timeout."""
        try:
            return self._free.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def refund(self, buf):
        self._free.put(buf)


class MultipartUpload(object):
    """One upload on the server. It occupies space there until it is completed or aborted."""

    def __init__(self, pool, key):
        self.pool = pool
        self.key = key
        self.upload_id = None
        self.etags = {}

    def begin(self):
        conn = self.pool.get()  # clean: put back in finally
        try:
            _, data = conn.request("POST", "/%s?uploads" % self.key)  # clean: the id of the upload is kept on self, which is returned
            self.upload_id = json.loads(data)["id"]
        finally:
            self.pool.put(conn)
        return self

    def send_part(self, number, view):
        """Sends one part. Three attempts, on another connection each time."""
        for attempt in range(3):
            conn = self.pool.get()  # clean: near miss, the finally runs before the next attempt and before the return
            try:
                path = "/%s?id=%s&part=%d" % (self.key, self.upload_id, number)
                headers, _ = conn.request("PUT", path, bytes(view))
                if headers["ETag"].strip('"') != hashlib.md5(view).hexdigest():
                    continue
                self.etags[number] = headers["ETag"]
                return
            except (OSError, StoreError) as e:
                conn.good = False
                logger.info("part %d of %s, attempt %d: %s", number, self.key, attempt, e)
            finally:
                self.pool.put(conn)
        raise StoreError("part %d of %s was not accepted" % (number, self.key))

    def complete(self):
        conn = self.pool.get()  # leak: a key that exists already raises StoreError before put
        _, data = conn.request("POST", "/%s?id=%s" % (self.key, self.upload_id), json.dumps(self.etags))
        if json.loads(data).get("conflict"):
            raise StoreError("%s exists already" % self.key)
        self.pool.put(conn)
        self.upload_id = None

    def abort(self):
        if self.upload_id is None:
            return
        conn = self.pool.get()  # clean: put back in finally
        try:
            conn.request("DELETE", "/%s?id=%s" % (self.key, self.upload_id))
        except StoreError as e:
            logger.warning("abort of %s: %s", self.key, e)
        finally:
            self.pool.put(conn)
        self.upload_id = None
