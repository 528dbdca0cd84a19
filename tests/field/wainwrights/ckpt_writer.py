"""Asynchronous sharded checkpoint writer.

The training thread copies tensors into regions of one big host arena and goes on; an executor writes the regions out.
"""
import hashlib
import json
import logging
import os
import threading
import time
from bisect import insort
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

logger = logging.getLogger("ckpt")


class ArenaFull(Exception):
    pass


class ShardError(Exception):
    pass


class Region:
    def __init__(self, arena, start, size):
        self.arena = arena
        self.start = start
        self.size = size
        self.freed = False

    @property
    def bytes(self):
        return self.arena.memory[self.start:self.start + self.size]

    def fill(self, array):
        self.bytes[:array.nbytes] = array.reshape(-1).view(np.uint8)
        return self

    def free(self):
        if not self.freed:
            self.freed = True
            self.arena._put_back(self.start, self.size)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()


class Arena:
    """First fit over a sorted list of holes."""

    ALIGN = 4096

    def __init__(self, size):
        self.memory = np.empty(size, dtype=np.uint8)
        self._holes = [(0, size)]
        self._cond = threading.Condition()

    def reserve(self, nbytes, block=True):
        need = -(-max(nbytes, 1) // self.ALIGN) * self.ALIGN
        if need > len(self.memory):
            raise ArenaFull(f"{nbytes} bytes do not fit an arena of {len(self.memory)}")
        with self._cond:
            while True:
                for i, (start, size) in enumerate(self._holes):
                    if size >= need:
                        self._holes.pop(i)  # clean: the remainder goes back at once and the rest is the region
                        if size > need:
                            insort(self._holes, (start + need, size - need))
                        return Region(self, start, need)
                if not block:
                    return None
                self._cond.wait()

    def _put_back(self, start, size):
        with self._cond:
            insort(self._holes, (start, size))
            merged = []
            for s, n in self._holes:
                if merged and merged[-1][0] + merged[-1][1] == s:
                    merged[-1] = (merged[-1][0], merged[-1][1] + n)
                else:
                    merged.append((s, n))
            self._holes = merged
            self._cond.notify_all()


class Snapshot:
    """All regions of one step.  Commit hands them to the writer, abort forgets the step."""

    def __init__(self, arena, step):
        self.arena = arena
        self.step = step
        self.parts = {}
        self.started = time.time()

    def add(self, name, array):
        if name in self.parts:
            raise ShardError(f"{name} added twice to step {self.step}")
        self.parts[name] = self.arena.reserve(array.nbytes).fill(array)  # leak: abort() clears the parts without freeing them

    def abort(self, why):
        logger.warning("step %d given up after %.1fs: %s", self.step, time.time() - self.started, why)
        self.parts.clear()

    def commit(self, writer):
        names = sorted(self.parts)
        futures = [writer.write_region(self.step, name, self.parts.pop(name)) for name in names]
        return futures


class Writer:
    def __init__(self, root, arena, workers=2):
        self.root = Path(root)
        self.arena = arena
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ckpt")
        self._digests = {}
        self._manifest_lock = threading.Lock()
        self.manifest = {}

    def _path(self, step, name):
        return self.root / f"step{step:08d}" / f"{name.replace('/', '.')}.bin"

    # -- writing bytes -----------------------------------------------------------------------------------

    def _write_file(self, path, view):
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = path.with_suffix(".tmp")
        fd = os.open(tmp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)  # leak: the OSError handler unlinks the file and returns with fd open
        try:
            pos = 0
            while pos < len(view):
                pos += os.write(fd, view[pos:pos + (8 << 20)])
            os.fsync(fd)
        except OSError as exc:
            logger.error("%s: %s", tmp, exc)
            tmp.unlink(missing_ok=True)
            return False
        os.close(fd)
        os.replace(tmp, path)
        return True

    def write_region(self, step, name, region) -> Future:
        fut = self._pool.submit(self._write_file, self._path(step, name), memoryview(region.bytes))
        fut.add_done_callback(lambda f: region.free())
        return fut

    def write_array(self, step, name, array) -> Future:
        region = self.arena.reserve(array.nbytes).fill(array)  # clean: near miss, the done callback of write_region also runs for a cancelled future
        return self.write_region(step, name, region)

    def write_optimizer(self, step, name, array, quantize):
        """Moments are quantized in the worker, since that takes longer than the copy."""
        region = self.arena.reserve(array.nbytes).fill(array)  # leak: close(now=True) cancels jobs that wait, and their body never runs

        def job():
            with region:
                packed = quantize(region.bytes[:array.nbytes].view(array.dtype))
                return self._write_file(self._path(step, name), memoryview(packed))

        return self._pool.submit(job)

    # -- deduplicated writes -----------------------------------------------------------------------------

    def write_if_changed(self, step, tensors):
        written = []
        for name, array in tensors.items():
            region = self.arena.reserve(array.nbytes, block=False)  # leak: an unchanged tensor goes on with the next one, region in hand
            if region is None:
                logger.info("arena full, %s is written in place", name)
                self._write_file(self._path(step, name), memoryview(array.reshape(-1).view(np.uint8)))
                continue
            region.fill(array)
            digest = hashlib.blake2b(region.bytes[:array.nbytes], digest_size=16).hexdigest()
            if self._digests.get(name) == digest:
                continue
            self._digests[name] = digest
            written.append(self.write_region(step, name, region))
        return written

    def write_with_retry(self, step, name, make_array, attempts=3):
        """make_array may see a tensor that is being updated; then its finite check fails and we copy again."""
        for attempt in range(attempts):
            array = make_array()
            region = self.arena.reserve(array.nbytes).fill(array)  # clean: freed before the next round or given to write_region
            if np.isfinite(region.bytes[:array.nbytes].view(array.dtype)).all():
                return self.write_region(step, name, region)
            region.free()
            time.sleep(0.01 * attempt)
        raise ShardError(f"{name} never settled")

    def write_pair(self, step, name, weights, scales):
        """Quantized weights go with their scales or not at all."""
        w = self.arena.reserve(weights.nbytes).fill(weights)  # leak: ArenaFull for the scales is turned into None below with w reserved
        try:
            s = self.arena.reserve(scales.nbytes).fill(scales)  # clean: near miss, handed to write_region, whose callback frees it
        except ArenaFull:
            logger.error("no room for the scales of %s", name)
            return None
        return [self.write_region(step, name + ".weights", w), self.write_region(step, name + ".scales", s)]

    # -- manifest and end --------------------------------------------------------------------------------

    def publish(self, step, futures):
        ok = all(f.result() for f in futures)
        with self._manifest_lock:
            self.manifest[step] = {"ok": ok, "time": time.time()}
            with open(self.root / "manifest.json", "w") as fh:  # clean: with
                json.dump(self.manifest, fh)
        return ok

    def close(self, now=False):
        self._pool.shutdown(wait=True, cancel_futures=now)


def save_step(writer, arena, step, state, should_stop):
    snap = Snapshot(arena, step)
    for name, array in state.items():
        if should_stop():
            snap.abort("stop requested")
            return False
        snap.add(name, array)
    return writer.publish(step, snap.commit(writer))


def verify(path, arena, digest):
    region = arena.reserve(os.path.getsize(path))  # clean: with
    with region:
        with open(path, "rb") as fh:  # clean: with
            fh.readinto(region.bytes)
        return hashlib.blake2b(region.bytes, digest_size=16).hexdigest() == digest
