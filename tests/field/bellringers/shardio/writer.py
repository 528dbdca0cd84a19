"""Writes shards under a per-directory lock file and a limited number of slots."""
import os
import queue
import time

from .manifest import Entry, Manifest


class WriteSlots:
    def __init__(self, n):
        self._q = queue.Queue()
        for i in range(n):
            self._q.put(i)

    def enter(self):
        return self._q.get()

    def leave(self, slot):
        self._q.put(slot)


class DirLock:
    def __init__(self, root):
        self.path = os.path.join(root, ".lock")
        self.fd = None

    def lock(self, timeout):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                self.fd = os.open(self.path, os.O_CREAT | os.O_EXCL)  # clean: kept in fd, unlock() closes it
                return True
            except FileExistsError:
                time.sleep(0.05)
        return False

    def unlock(self):
        os.close(self.fd)
        self.fd = None
        os.unlink(self.path)


class ShardWriter:
    def __init__(self, root, slots):
        self.root = root
        self.slots = slots
        self.dir_lock = DirLock(root)
        self.entries = {}

    def write(self, shard, tensors):
        slot = self.slots.enter()  # leak: not left when the shard is on disk already
        path = os.path.join(self.root, shard)
        if os.path.exists(path):
            return 0
        off = 0
        with open(path, "wb") as f:  # clean: closed by with
            for key, (dtype, t) in tensors.items():
                raw = t.contiguous().numpy().tobytes()
                f.write(raw)
                self.entries[key] = Entry(shard, off, len(raw), dtype, tuple(t.shape))
                off += len(raw)
        self.slots.leave(slot)
        return off

    def publish(self, overwrite):
        if not self.dir_lock.lock(10.0):  # leak: not unlocked when there is nothing to publish
            return False
        if not self.entries:
            return False
        ok = Manifest(self.entries).save(self.root, overwrite)
        self.dir_lock.unlock()
        return ok

    def purge(self, keep):
        if not self.dir_lock.lock(10.0):  # clean: unlocked in finally
            return 0
        try:
            stale = [n for n in os.listdir(self.root) if n.endswith(".bin") and n not in keep]
            for n in stale:
                os.unlink(os.path.join(self.root, n))
            return len(stale)
        finally:
            self.dir_lock.unlock()
