"""Asynchronous checkpoint writer: staging shards, file handles and a rank lock."""
from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor


class StageShard:
    def __init__(self, sid, size):
        self.sid = sid
        self.size = size
        self.data = b""


class StagePool:
    def __init__(self, n, size):
        self._shards = [StageShard(i, size) for i in range(n)]
        self._lock = threading.Lock()

    def get_shard(self):
        with self._lock:
            if not self._shards:
                return None
            return self._shards.pop()  # clean: the caller's from here

    def put_shard(self, shard):
        with self._lock:
            shard.data = b""
            self._shards.append(shard)


class ShardWriter:
    def __init__(self, root):
        self.root = root
        self.written = []

    def write(self, shard):
        path = os.path.join(self.root, f"{shard.sid}.bin")
        with open(path, "wb") as f:  # clean: with statement
            f.write(shard.data)
        self.written.append(path)

    def write_index(self, names):
        f = open(os.path.join(self.root, "index.txt"), "w")  # leak: nothing to index, nothing closed
        if not names:
            return 0
        for name in names:
            f.write(name + "\n")
        f.close()
        return len(names)

    def read_index(self):
        path = os.path.join(self.root, "index.txt")
        if not os.path.exists(path):
            return []
        f = open(path)  # clean: near miss, closed before the version test returns
        lines = f.read().split("\n")
        f.close()
        if lines and lines[0].startswith("v"):
            return lines[1:]
        return lines


class AsyncCheckpointer:
    def __init__(self, pool, writer, workers=2):
        self.pool = pool
        self.writer = writer
        self.exec = ThreadPoolExecutor(workers)  # clean: shut down in close()
        self.rank_lock = threading.Lock()
        self.staged = {}
        self.last_step = -1

    def _flush_one(self, shard):
        try:
            self.writer.write(shard)
        finally:
            self.pool.put_shard(shard)

    def stage(self, name, blob):
        if name in self.staged:
            return False
        shard = self.pool.get_shard()  # leak: blobs over the shard size are refused after the shard was taken
        if shard is None:
            return False
        if len(blob) > shard.size:
            return False
        shard.data = blob
        self.staged[name] = shard
        return True

    def restage(self, name, blob):
        shard = self.staged.get(name) or self.pool.get_shard()  # clean: near miss, only taken for a new name, commit() or discard() empties the table
        if shard is None:
            return False
        self.staged[name] = shard
        shard.data = blob[:shard.size]
        return True

    def submit(self, blob):
        shard = self.pool.get_shard()  # clean: near miss, _flush_one puts it back on the executor's thread
        if shard is None:
            return None
        shard.data = blob
        return self.exec.submit(self._flush_one, shard)

    def submit_if_due(self, step, blob, every):
        shard = self.pool.get_shard()  # leak: off-step calls return before the submit
        if shard is None:
            return None
        if step % every:
            return None
        shard.data = blob
        return self.exec.submit(self._flush_one, shard)

    def commit(self, step):
        self.rank_lock.acquire()  # leak: a step already written returns with the lock held
        if step <= self.last_step:
            return False
        for name in list(self.staged):
            self._flush_one(self.staged.pop(name))
        self.last_step = step
        self.rank_lock.release()
        return True

    def try_commit(self, step):
        if not self.rank_lock.acquire(blocking=False):  # clean: near miss, not held where it says no, else the finally
            return False
        try:
            if step <= self.last_step:
                return False
            for name in list(self.staged):
                self._flush_one(self.staged.pop(name))
            self.last_step = step
            return True
        finally:
            self.rank_lock.release()

    def discard(self):
        while self.staged:
            _, shard = self.staged.popitem()
            self.pool.put_shard(shard)

    def close(self):
        self.discard()
        self.exec.shutdown(wait=True)


class EmaCheckpointer(AsyncCheckpointer):
    def stage_ema(self, names, blobs):
        n = 0
        for name in names:
            shard = self.pool.get_shard()  # leak: a name staged already has its shard overwritten
            if shard is None:
                break
            shard.data = blobs.get(name, b"")
            self.staged["ema/" + name] = shard
            n += 1
        return n

    def snapshot(self, blobs):
        out = []
        shards = []
        for blob in blobs:
            shard = self.pool.get_shard()  # clean: both exits of the loop pass the second loop
            if shard is None:
                break
            shards.append(shard)
            shard.data = blob
            out.append(len(shard.data))
        for shard in shards:
            self.pool.put_shard(shard)
        return out


def lock_step_file(root):
    fd = os.open(os.path.join(root, "step.lock"), os.O_CREAT | os.O_RDWR)  # leak: a fresh, empty file returns without closing
    raw = os.read(fd, 16)
    if not raw:
        return -1
    os.close(fd)
    return int(raw)
