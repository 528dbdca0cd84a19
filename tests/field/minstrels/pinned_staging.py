"""Checkpoint staging through pinned host memory.

save_async() copies every tensor of a state dict into a pinned region on a side stream and returns as
soon as the copies are queued; a writer thread waits for the copy event and writes the file. The pool has
a handful of size classes, so that a region can be reused by another tensor of about the same size.
"""
import collections
import hashlib
import logging
import os
import struct
import threading
import time

import torch

logger = logging.getLogger(__name__)

CLASSES = (1 << 20, 1 << 23, 1 << 26, 1 << 29)
HEADER = struct.Struct("<8sQ32s")


class StagingError(Exception):
    pass


class Region:
    __slots__ = ("pool", "mem", "cls", "nbytes")

    def __init__(self, pool, mem, cls, nbytes):
        self.pool = pool
        self.mem = mem
        self.cls = cls
        self.nbytes = nbytes

    def bytes_view(self):
        return self.mem[: self.nbytes]

    def release(self):
        self.pool._back(self)


class PinnedPool:
    def __init__(self, per_class):
        self._free = {c: [torch.empty(c, dtype=torch.uint8).pin_memory() for _ in range(n)]
                      for c, n in zip(CLASSES, per_class)}
        self._cond = threading.Condition()
        self.leased_bytes = 0

    @staticmethod
    def size_class(nbytes):
        for c in CLASSES:
            if nbytes <= c:
                return c
        raise StagingError("%d bytes do not fit the largest region" % nbytes)

    def lease(self, nbytes, wait=True):
        cls = self.size_class(nbytes)
        with self._cond:
            while not self._free[cls]:
                if not wait:
                    return None
                self._cond.wait()
            mem = self._free[cls].pop()  # clean: wrapped in the Region that is returned
            self.leased_bytes += cls
        return Region(self, mem, cls, nbytes)

    def lease_all(self, sizes):
        """One region per size without waiting, or None if they are not all there."""
        regions = [self.lease(n, wait=False) for n in sizes]  # leak: when one is None the others are dropped
        if any(r is None for r in regions):
            return None
        return regions

    def _back(self, region):
        with self._cond:
            self.leased_bytes -= region.cls
            self._free[region.cls].append(region.mem)
            self._cond.notify_all()


class WriteJob:
    def __init__(self, path, region, event):
        self.path = path
        self.region = region
        self.event = event


def write_region(path, region):
    """Header, then payload, then rename. Returns the number of bytes on disk."""
    data = region.bytes_view().numpy()
    digest = hashlib.sha256(data).digest()
    tmp = path + ".tmp"
    f = open(tmp, "wb")  # leak: the short write raises StagingError before the close
    f.write(HEADER.pack(b"PINCKPT1", region.nbytes, digest))
    n = f.write(memoryview(data))
    if n != region.nbytes:
        raise StagingError("%s: wrote %d of %d bytes" % (tmp, n, region.nbytes))
    f.flush()
    os.fsync(f.fileno())
    f.close()
    os.replace(tmp, path)
    return n + HEADER.size


class Writer(threading.Thread):
    def __init__(self, name="ckpt-writer"):
        super().__init__(name=name, daemon=True)
        self._jobs = collections.deque()
        self._cond = threading.Condition()
        self._stopping = False
        self.errors = []
        self.written = 0

    def enqueue(self, job):
        with self._cond:
            self._jobs.append(job)
            self._cond.notify()

    def cancel(self):
        """A newer checkpoint makes the queued rest of the older one pointless."""
        with self._cond:
            n = len(self._jobs)
            self._jobs.clear()
        logger.info("cancelled %d queued writes", n)

    def stop(self):
        with self._cond:
            self._stopping = True
            self._cond.notify()
        self.join()

    def run(self):
        while True:
            with self._cond:
                while not self._jobs and not self._stopping:
                    self._cond.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job.event.synchronize()
                self.written += write_region(job.path, job.region)
            except (OSError, StagingError) as e:
                self.errors.append((job.path, e))
            finally:
                job.region.release()


class Stager:
    def __init__(self, pool, writer, root, header_bytes=1 << 16):
        self.pool = pool
        self.writer = writer
        self.root = root
        self.stream = torch.cuda.Stream()
        self.meta = pool.lease(header_bytes)  # clean: kept on self, released in close()
        self.lock_fd = os.open(os.path.join(root, ".lock"), os.O_CREAT | os.O_RDWR)  # clean: kept on self, closed in close()
        self.scratch = None

    def stage(self, name, tensor):
        nbytes = tensor.numel() * tensor.element_size()
        region = self.pool.lease(nbytes)  # leak: a job that Writer.cancel clears is never released
        with torch.cuda.stream(self.stream):
            region.bytes_view().copy_(tensor.detach().reshape(-1).view(torch.uint8), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.writer.enqueue(WriteJob(os.path.join(self.root, name), region, event))

    def save_async(self, state):
        if self.writer.errors:
            path, err = self.writer.errors[0]
            raise StagingError("previous checkpoint failed at %s: %s" % (path, err))
        self.writer.cancel()
        for name, tensor in state.items():
            self.stage(name, tensor)

    def save_now(self, name, tensor):
        """Used on SIGTERM: no thread, no stream, True if the file is there."""
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        try:
            region = self.pool.lease(flat.numel(), wait=False)  # clean: released in the inner finally
        except StagingError:
            logger.error("%s is too large to be saved on the way out", name)
            return False
        if region is None:
            return False
        try:
            region.bytes_view().copy_(flat)
            write_region(os.path.join(self.root, name), region)
        except (OSError, StagingError) as e:
            logger.error("last-minute save of %s: %s", name, e)
            return False
        finally:
            region.release()
        return True

    def grow_scratch(self, nbytes):
        if self.scratch is not None and self.scratch.cls >= nbytes:
            self.scratch.nbytes = nbytes
            return self.scratch
        self.scratch = self.pool.lease(nbytes)  # leak: a smaller scratch that was there is overwritten
        return self.scratch

    def close(self):
        self.writer.stop()
        self.meta.release()
        if self.scratch is not None:
            self.scratch.release()
            self.scratch = None
        os.close(self.lock_fd)


def load_tensor(pool, path, out):
    """Reads one file into `out`. False where the file does not match its digest."""
    f = open(path, "rb")  # clean: near miss, closed on each of the three ways out
    head = f.read(HEADER.size)
    if len(head) < HEADER.size:
        f.close()
        return False
    magic, nbytes, digest = HEADER.unpack(head)
    if magic != b"PINCKPT1" or nbytes != out.numel() * out.element_size() or nbytes > CLASSES[-1]:
        f.close()
        return False
    region = pool.lease(nbytes)  # leak: the digest mismatch returns with the region leased
    f.readinto(memoryview(region.bytes_view().numpy()))
    f.close()
    if hashlib.sha256(region.bytes_view().numpy()).digest() != digest:
        logger.error("%s is damaged", path)
        return False
    out.reshape(-1).view(torch.uint8).copy_(region.bytes_view())
    region.release()
    return True


def load_pair(pool, paths, outs):
    sizes = [o.numel() * o.element_size() for o in outs]
    regions = pool.lease_all(sizes)  # clean: all released in finally, None means nothing was handed out
    if regions is None:
        return [load_tensor(pool, p, o) for p, o in zip(paths, outs)]
    t0 = time.time()
    try:
        for p, r in zip(paths, regions):
            with open(p, "rb") as f:  # clean: with
                f.seek(HEADER.size)
                f.readinto(memoryview(r.bytes_view().numpy()))
        for o, r in zip(outs, regions):
            o.reshape(-1).view(torch.uint8).copy_(r.bytes_view())
    finally:
        for r in regions:
            r.release()
    logger.debug("pair loaded in %.2fs", time.time() - t0)
    return [True] * len(outs)
