"""Trainer -> rollout weight synchronisation through a staging arena (threads)."""
import bisect
import logging
import queue
import threading
import time

import numpy as np

LOG = logging.getLogger("wsync")
BUCKET = 64 << 20


class ArenaTimeout(RuntimeError):
    pass


class TransportError(OSError):
    pass


class Bucket:
    def __init__(self, arena, off, size):
        self.arena, self.off, self.size = arena, off, size
        self.used = 0
        self.names = []

    def fits(self, arr):
        return self.used + arr.nbytes <= self.size

    def write(self, name, arr):
        start = self.off + self.used
        self.arena.mem[start:start + arr.nbytes] = arr.view(np.uint8).ravel()
        self.names.append((name, start, arr.shape, str(arr.dtype)))
        self.used += arr.nbytes

    def view(self):
        return self.arena.mem[self.off:self.off + self.used]

    def release(self):
        self.arena._put_back(self.off, self.size)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()


class StagingArena:
    def __init__(self, capacity, align=512):
        self.mem = np.zeros(capacity, dtype=np.uint8)
        self.align = align
        self._spans = [(0, capacity)]
        self._cv = threading.Condition()

    def _round(self, n):
        return -(-n // self.align) * self.align

    def _find(self, need):
        for i, (_, size) in enumerate(self._spans):
            if size >= need:
                return i
        return None

    def reserve(self, nbytes, block=True, timeout=30.0):
        need = self._round(nbytes)
        with self._cv:
            while True:
                i = self._find(need)
                if i is not None:
                    break
                if not block:
                    return None
                if not self._cv.wait(timeout):
                    raise ArenaTimeout(f"{need} bytes")
            off, size = self._spans.pop(i)  # clean: the remainder goes back and the rest is the caller's bucket
            if size > need:
                self._spans.insert(i, (off + need, size - need))
            return Bucket(self, off, need)

    def reserve_tail(self, nbytes):
        """Control messages live at the end so that they do not fragment the front."""
        need = self._round(nbytes)
        with self._cv:
            if not self._spans:
                return None
            off, size = self._spans.pop()  # leak: a last span that is too small is not put back before None is returned
            if size < need:
                return None
            if size > need:
                self._spans.append((off, size - need))
            return Bucket(self, off + size - need, need)

    def _put_back(self, off, size):
        with self._cv:
            i = bisect.bisect(self._spans, (off, size))
            if i < len(self._spans) and off + size == self._spans[i][0]:
                size += self._spans.pop(i)[1]  # clean: near miss, merged into the span that goes back
            if i and sum(self._spans[i - 1]) == off:
                self._spans[i - 1] = (self._spans[i - 1][0], self._spans[i - 1][1] + size)
            else:
                self._spans.insert(i, (off, size))
            self._cv.notify_all()


class Sender(threading.Thread):
    def __init__(self, group):
        super().__init__(daemon=True, name="wsync-send")
        self.group = group
        self.outbox = queue.Queue()
        self.sent_bytes = 0
        self.errors = 0

    def run(self):
        while True:
            bucket = self.outbox.get()  # clean: released in the finally
            if bucket is None:
                return
            try:
                self.group.broadcast(bucket.view(), bucket.names)
                self.sent_bytes += bucket.used
            except TransportError as e:
                self.errors += 1
                LOG.error("broadcast: %s", e)
            finally:
                bucket.release()


class Packer(threading.Thread):
    def __init__(self, arena, source, sender):
        super().__init__(daemon=True, name="wsync-pack")
        self.arena, self.source, self.sender = arena, source, sender
        self.stop = threading.Event()

    def run(self):
        t0 = time.monotonic()
        bucket = self.arena.reserve(BUCKET)  # leak: the stop event returns with the bucket unsent
        for name, arr in self.source:
            if self.stop.is_set():
                LOG.info("packer stopped at %s", name)
                return
            if not bucket.fits(arr):
                self.sender.outbox.put(bucket)
                bucket = self.arena.reserve(max(BUCKET, arr.nbytes))  # leak: the next turn may see the stop event and return
            bucket.write(name, arr)
        self.sender.outbox.put(bucket)
        LOG.info("packed in %.2fs", time.monotonic() - t0)


class Delta:
    def __init__(self, bucket, base_version, scale):
        self.bucket, self.base_version, self.scale = bucket, base_version, scale


class WeightSync:
    def __init__(self, group, capacity=1 << 30):
        self.arena = StagingArena(capacity)
        self.group = group
        self.sender = Sender(group)
        self.version = 0
        self._latest = None
        self._lock = threading.Lock()

    def start(self):
        self.sender.start()

    def full_sync(self, source):
        packer = Packer(self.arena, source, self.sender)
        packer.start()
        self.version += 1
        return packer

    def _encode(self, name, new, old):
        diff = self.arena.reserve(new.nbytes, block=False)  # clean: near miss, released on the failing branch and after the quantisation
        if diff is None:
            return None
        packed = self.arena.reserve(new.size, block=False)  # clean: goes out inside the Delta
        if packed is None:
            diff.release()
            return None
        diff.write(name, new - old)
        scale = float(np.abs(new - old).max()) / 127 or 1.0
        packed.write(name, np.round((new - old) / scale).astype(np.int8))
        diff.release()
        return Delta(packed, self.version, scale)

    def push_delta(self, name, new, old):
        delta = self._encode(name, new, old)  # leak: a version that moved on returns False and forgets the delta's bucket
        if delta is None:
            return False
        if delta.base_version != self.version:
            LOG.info("delta for %s is stale", name)
            return False
        self.sender.outbox.put(delta.bucket)
        return True

    def scatter(self, name, shards):
        buckets = [self.arena.reserve(s.nbytes) for s in shards]  # leak: ArenaTimeout on a later shard loses the earlier ones
        for rank, (b, s) in enumerate(zip(buckets, shards)):
            b.write(f"{name}.{rank}", s)
            self.sender.outbox.put(b)

    def publish_latest(self, name, arr):
        """Late joiners pull the last embedding table from here."""
        fresh = self.arena.reserve(arr.nbytes)  # clean: the one it replaces is released and close() releases the last
        fresh.write(name, arr)
        with self._lock:
            old, self._latest = self._latest, fresh
        if old is not None:
            old.release()

    def send_manifest(self, blob):
        head = self.arena.reserve_tail(len(blob))  # leak: TransportError is caught and the header stays reserved
        if head is None:
            return False
        head.write("manifest", np.frombuffer(blob, dtype=np.uint8))
        try:
            self.group.send_control(head.view())
        except TransportError as e:
            LOG.warning("manifest: %s", e)
            return False
        head.release()
        return True

    def resync_replica(self, rank, arrays):
        total = sum(a.nbytes for _, a in arrays)
        with self.arena.reserve(total) as b:  # clean: context manager
            for name, arr in arrays:
                b.write(name, arr)
            self.group.send_to(rank, b.view(), b.names)

    def push_now(self, name, arr):
        bucket = self.arena.reserve(arr.nbytes)  # clean: near miss, the flag says whether the sender has it
        handed = False
        try:
            bucket.write(name, arr)
            if self.sender.is_alive():
                self.sender.outbox.put(bucket)
                handed = True
            return handed
        finally:
            if not handed:
                bucket.release()

    def close(self):
        self.sender.outbox.put(None)
        self.sender.join()
        while not self.sender.outbox.empty():
            left = self.sender.outbox.get_nowait()  # clean: released on the next lines
            if left is not None:
                left.release()
        if self._latest is not None:
            self._latest.release()
            self._latest = None
