"""Checkpoint uploader: reads shard files, sends them as multipart objects, resumes after failures."""
import hashlib
import logging
import queue
import threading
import time

logger = logging.getLogger("ckpt.upload")

PART = 16 << 20


class PartBuffers:
    """Fixed set of part-sized bytearrays shared by all uploads of the process."""

    def __init__(self, count, size=PART):
        self._spare = queue.LifoQueue()
        self.size = size
        for _ in range(count):
            self._spare.put(bytearray(size))

    def rent(self, timeout=None):
        try:
            return self._spare.get(timeout=timeout)
        except queue.Empty:
            return None

    def hand_back(self, buf):
        self._spare.put(buf)


class UploadSlots:
    def __init__(self, n):
        self._n = n
        self._busy = set()
        self._cv = threading.Condition()

    def claim(self):
        with self._cv:
            while len(self._busy) >= self._n:
                self._cv.wait()
            slot = next(i for i in range(self._n) if i not in self._busy)
            self._busy.add(slot)
            return slot

    def vacate(self, slot):
        with self._cv:
            self._busy.discard(slot)
            self._cv.notify()


class SlotGuard:
    """with SlotGuard(slots) as g: g.slot is the slot's number."""

    def __init__(self, slots):
        self.slots = slots
        self.slot = None

    def __enter__(self):
        self.slot = self.slots.claim()  # leak: __exit__ returns early on an aborted upload
        return self

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None and issubclass(exc_type, ConnectionAbortedError):
            logger.warning("upload aborted by peer")
            return True
        self.slots.vacate(self.slot)
        return False


class Part:
    def __init__(self, number, buf, length):
        self.number = number
        self.buf = buf
        self.length = length


class CheckpointUploader:
    def __init__(self, client, buffers, slots):
        self.client = client
        self.buffers = buffers
        self.slots = slots
        self.pending = queue.Queue()
        self.failed_parts = []

    def digest(self, path):
        buf = self.buffers.rent()  # clean: handed back in finally
        h = hashlib.sha256()
        try:
            with open(path, "rb") as f:  # clean: with statement
                while True:
                    n = f.readinto(buf)
                    if not n:
                        return h.hexdigest()
                    h.update(memoryview(buf)[:n])
        finally:
            self.buffers.hand_back(buf)

    def enqueue_file(self, path):
        f = open(path, "rb")  # clean: closed in finally
        try:
            number = 0
            while True:
                buf = self.buffers.rent()  # leak: the one rented for the end of file is dropped
                n = f.readinto(buf)
                if n == 0:
                    return number
                number += 1
                self.pending.put(Part(number, buf, n))
        finally:
            f.close()

    def enqueue_bytes(self, blob):
        number = 0
        for lo in range(0, len(blob), self.buffers.size):
            buf = self.buffers.rent()  # clean: near miss, moved into pending, whose worker hands it back
            chunk = blob[lo:lo + self.buffers.size]
            buf[:len(chunk)] = chunk
            number += 1
            self.pending.put(Part(number, buf, len(chunk)))
        return number

    def worker(self, upload_id):
        while True:
            part = self.pending.get()
            if part is None:
                return
            try:
                self.client.put_part(upload_id, part.number, memoryview(part.buf)[:part.length])
            except OSError as exc:
                logger.warning("part %d: %s", part.number, exc)
                self.failed_parts.append(part.number)
            finally:
                self.buffers.hand_back(part.buf)

    def upload_manifest(self, key, text):
        data = text.encode()
        buf = self.buffers.rent(timeout=30)  # leak: an oversized manifest returns with it
        if buf is None:
            raise TimeoutError("no part buffer for the manifest")
        if len(data) > len(buf):
            logger.error("manifest %s too large (%d)", key, len(data))
            return None
        buf[:len(data)] = data
        try:
            return self.client.put(key, memoryview(buf)[:len(data)])
        finally:
            self.buffers.hand_back(buf)

    def put_with_retry(self, key, payload, tries=5):
        for attempt in range(tries):
            slot = self.slots.claim()  # clean: near miss, vacated by finally before each retry
            try:
                return self.client.put(key, payload)
            except ConnectionError:
                if attempt + 1 == tries:
                    raise
            finally:
                self.slots.vacate(slot)
            time.sleep(2 ** attempt)

    def copy_with_retry(self, src, dst, tries=5):
        slot = None
        for attempt in range(tries):
            slot = self.slots.claim()  # leak: each failed try claims another slot
            status = self.client.copy(src, dst)
            if status == 200:
                break
            logger.info("copy try %d: %d", attempt, status)
            time.sleep(1)
        self.slots.vacate(slot)

    def send_optimizer(self, path, key):
        with SlotGuard(self.slots) as guard:  # leak: aborted upload swallowed with the slot claimed
            logger.debug("slot %s -> %s", guard.slot, key)
            with open(path, "rb") as f:  # clean: with statement
                self.client.put(key, f)

    def verify(self, path, key, etag):
        f = open(path, "rb")  # leak: left open when the object is gone
        head = self.client.head(key)
        if head is None:
            return False
        ok = hashlib.md5(f.read()).hexdigest() == etag
        f.close()
        return ok
