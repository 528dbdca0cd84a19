"""Streams checkpoint shards from disk to the GPU through pinned staging memory.
"""
import json
import logging
import mmap
import os
import queue
import struct
import threading
import time
from collections import deque

import torch

log = logging.getLogger("weights")

MAGIC = b"WSHD"
_STOP = object()


class TruncatedShard(IOError): pass
class StagingTimeout(Exception): pass


class Staging:
    def __init__(self, size):
        self.size = size
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.used = 0

    def fill(self, piece):
        memoryview(self.tensor.numpy())[: self.used] = piece


class StagingPool:
    def __init__(self, sizes):
        self._cond = threading.Condition()
        self._free = deque(Staging(s) for s in sorted(sizes))

    def checkout(self, nbytes, timeout=30.0):
        deadline = time.monotonic() + timeout
        with self._cond:
            while True:
                if not self._free:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise StagingTimeout(f"no staging memory for {nbytes} bytes")
                    self._cond.wait(left)
                    continue
                buf = self._free.popleft()  # leak: a buffer that is too small is passed over and not appended again
                if buf.size < nbytes:
                    log.debug("staging of %d too small for %d", buf.size, nbytes)
                    continue
                buf.used = nbytes
                return buf

    def try_checkout(self, nbytes):
        with self._cond:
            if not self._free:
                return None
            buf = self._free.pop()  # clean: near miss, appended again when it is too small
            if buf.size < nbytes:
                self._free.append(buf)
                return None
            buf.used = nbytes
            return buf

    def checkin(self, buf):
        with self._cond:
            buf.used = 0
            self._free.append(buf)
            self._cond.notify()


class CopyJob:
    def __init__(self, name, dest, buf):
        self.name = name
        self.dest = dest
        self.buf = buf
        self.cancelled = False

    def run(self, stream):
        with torch.cuda.stream(stream):
            self.dest.view(torch.uint8).flatten().copy_(self.buf.tensor[: self.buf.used])
        stream.synchronize()

    def finish(self, pool):
        pool.checkin(self.buf)


class QuantCopyJob(CopyJob):
    def __init__(self, name, dest, buf, scale_dest, scales):
        super().__init__(name, dest, buf)
        self.scale_dest = scale_dest
        self.scales = scales

    def run(self, stream):
        super().run(stream)
        n = self.scales.used
        self.scale_dest.view(torch.uint8).flatten().copy_(self.scales.tensor[:n])


def read_header(path):
    fd = os.open(path, os.O_RDONLY)  # leak: a bad magic returns with the descriptor open
    head = os.read(fd, 12)
    if head[:4] != MAGIC:
        log.warning("%s is no shard", path)
        return None
    (length,) = struct.unpack("<Q", head[4:])
    blob = os.read(fd, length)
    os.close(fd)
    meta = json.loads(blob)
    meta["__base__"] = 12 + length
    return meta


class ShardMap:
    def __init__(self):
        self._maps = {}
        self._lock = threading.Lock()

    def get(self, path):
        with self._lock:
            found = self._maps.get(path)
            if found is None:
                fd = os.open(path, os.O_RDONLY)  # clean: closed in the finally, the map keeps its own reference
                try:
                    found = mmap.mmap(fd, 0, prot=mmap.PROT_READ)  # clean: kept in the table that close() empties
                finally:
                    os.close(fd)
                self._maps[path] = found
            return found

    def close(self):
        with self._lock:
            while self._maps:
                _, m = self._maps.popitem()
                m.close()


class Reader(threading.Thread):
    def __init__(self, todo, jobs, pool, shards, params, failed):
        super().__init__(daemon=True, name="shard-reader")
        self.todo = todo
        self.jobs = jobs
        self.pool = pool
        self.shards = shards
        self.params = params
        self.failed = failed

    def _fill(self, buf, path, start):
        src = self.shards.get(path)
        piece = src[start:start + buf.used]
        if len(piece) < buf.used:
            raise TruncatedShard(f"{path}: wanted {buf.used} at {start}, got {len(piece)}")
        buf.fill(piece)

    def _dense(self, path, base, name, info):
        nbytes = info["end"] - info["begin"]
        buf = self.pool.checkout(nbytes)  # clean: near miss, moves into a job whose finish() is always called
        try:
            self._fill(buf, path, base + info["begin"])
        except TruncatedShard:
            self.pool.checkin(buf)
            raise
        self.jobs.put(CopyJob(name, self.params[name], buf))

    def _quantised(self, path, base, name, info):
        packed = self.pool.checkout(info["end"] - info["begin"])  # leak: _fill or the second checkout raises, and run() swallows it
        self._fill(packed, path, base + info["begin"])
        at = info["scales"]
        scales = self.pool.checkout(at["end"] - at["begin"])  # leak: finish() of the job, inherited, gives back the packed buffer only
        self._fill(scales, path, base + at["begin"])
        self.jobs.put(QuantCopyJob(name, self.params[name], packed, self.params[name + ".scales"], scales))

    def _probe_bandwidth(self, path):
        buf = self.pool.try_checkout(1 << 20)  # clean: near miss, None is not given back and everything else is
        if buf is None:
            return None
        t0 = time.perf_counter()
        try:
            self._fill(buf, path, 0)
        except TruncatedShard:
            return None
        finally:
            self.pool.checkin(buf)
        return (1 << 20) / (time.perf_counter() - t0)

    def run(self):
        while True:
            item = self.todo.get()
            if item is _STOP:
                return
            path, name, info, base = item
            try:
                if info.get("scales"):
                    self._quantised(path, base, name, info)
                else:
                    self._dense(path, base, name, info)
            except (TruncatedShard, StagingTimeout) as exc:
                log.error("%s: %s", name, exc)
                self.failed.append(name)
            if info.get("probe"):
                log.info("%s: %s B/s", path, self._probe_bandwidth(path))


class Copier(threading.Thread):
    def __init__(self, jobs, pool):
        super().__init__(daemon=True, name="shard-copier")
        self.jobs = jobs
        self.pool = pool

    def run(self):
        stream = torch.cuda.Stream()
        while True:
            job = self.jobs.get()
            if job is _STOP:
                return
            try:
                if not job.cancelled:
                    job.run(stream)
            finally:
                job.finish(self.pool)


def smoke_test(pool):
    for size in (4096, 1 << 20):
        buf = pool.checkout(size, timeout=1.0)  # leak: the continue for pageable memory skips the checkin
        if not buf.tensor.is_pinned():
            log.warning("staging memory is pageable")
            continue
        pool.checkin(buf)


def load(paths, params, pool, readers=4):
    todo, jobs, failed = queue.Queue(), queue.Queue(maxsize=64), []
    shards = ShardMap()  # clean: closed in the finally
    try:
        for path in paths:
            meta = read_header(path)
            if meta is None:
                failed.append(path)
                continue
            base = meta.pop("__base__")
            for name, info in meta.items():
                todo.put((path, name, info, base))
        copier = Copier(jobs, pool)
        copier.start()
        crew = [Reader(todo, jobs, pool, shards, params, failed) for _ in range(readers)]
        for r in crew:
            todo.put(_STOP)
        for r in crew:
            r.start()
        for r in crew:
            r.join()
        jobs.put(_STOP)
        copier.join()
    finally:
        shards.close()
    return failed
