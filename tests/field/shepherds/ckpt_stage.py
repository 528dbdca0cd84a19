"""Asynchronous checkpoint writer.

The training thread copies each shard into a staging buffer and goes on; writer threads put the buffers on disk
and recycle them from a done-callback. Also here: the manifest lock, the upload of finished files.
"""
from __future__ import annotations

import concurrent.futures as cf
import json
import logging
import os
import pathlib
import threading
import time
import zlib

import torch

LOG = logging.getLogger("ckpt")

class StagingExhausted(RuntimeError):
    pass

class ShardTooLarge(ValueError):
    pass

class StagingBuffer:
    def __init__(self, ident: int, nbytes: int):
        self.ident = ident
        self.data = bytearray(nbytes)
        self.used = 0
        self.crc = 0

    def fill(self, payload: memoryview) -> None:
        self.used = len(payload)
        self.data[:self.used] = payload
        self.crc = zlib.crc32(payload)

    def view(self) -> memoryview:
        return memoryview(self.data)[:self.used]

class StagingArea:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._cond = threading.Condition()
        self._spare = [StagingBuffer(i, nbytes) for i in range(count)]
        self._count = count

    def checkout(self, timeout: float | None = None) -> StagingBuffer:
        with self._cond:
            if not self._cond.wait_for(lambda: self._spare, timeout):
                raise StagingExhausted(f"no staging buffer within {timeout}s")
            return self._spare.pop()  # clean: returned to the caller

    def recycle(self, buf: StagingBuffer) -> None:
        buf.used = 0
        with self._cond:
            self._spare.append(buf)
            self._cond.notify()

    def all_back(self, timeout: float) -> bool:
        with self._cond:
            return self._cond.wait_for(lambda: len(self._spare) == self._count, timeout)

class ManifestLock:
    """A lock file; two jobs that write the same directory would spoil the manifest."""

    def __init__(self, directory: pathlib.Path):
        self.path = directory / "manifest.lock"

    def acquire(self) -> bool:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: closed here, the file itself is the lock
        except FileExistsError:
            return False
        try:
            os.write(fd, str(os.getpid()).encode())
        finally:
            os.close(fd)
        return True

    def release(self) -> None:
        self.path.unlink(missing_ok=True)

class CheckpointWriter:
    def __init__(self, directory: str, staging: StagingArea, threads: int = 4):
        self.dir = pathlib.Path(directory)
        self.staging = staging
        self.pool = cf.ThreadPoolExecutor(threads, thread_name_prefix="ckpt")  # clean: close() shuts it down
        self.lock = ManifestLock(self.dir)
        self.futures: dict[str, cf.Future] = {}
        self.delta_base: dict[str, StagingBuffer] = {}
        self.paused = False
        self.bytes_written = 0

    def save_shard(self, name: str, tensor: torch.Tensor) -> cf.Future:
        buf = self.staging.checkout(timeout=120.0)  # leak: a shard over the buffer size raises ShardTooLarge after checkout
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
        if raw.nbytes > self.staging.nbytes:
            raise ShardTooLarge(f"{name}: {raw.nbytes} bytes")
        buf.fill(memoryview(raw))
        future = self.pool.submit(self._write, name, buf)
        future.add_done_callback(lambda f: self._written(name, buf, f))
        self.futures[name] = future
        return future

    def _write(self, name: str, buf: StagingBuffer) -> int:
        tmp = self.dir / f".{name}.tmp"
        with open(tmp, "wb") as fh:  # clean: with block
            fh.write(buf.view())
            fh.flush()
            os.fsync(fh.fileno())
        tmp.rename(self.dir / name)
        return buf.used

    def _written(self, name: str, buf: StagingBuffer, future: cf.Future) -> None:
        self.staging.recycle(buf)
        if future.exception() is not None:
            LOG.error("shard %s: %s", name, future.exception())
            return
        self.bytes_written += future.result()

    def save_small(self, name: str, payload: bytes) -> bool:
        """Optimizer scalars and the like; skipped rather than waited for."""
        try:
            buf = self.staging.checkout(timeout=0.0)  # clean: near miss, recycled on both ways out, the handler has no buffer
        except StagingExhausted:
            return False
        try:
            if len(payload) > self.staging.nbytes:
                return False
            buf.fill(memoryview(payload))
            self._write(name, buf)
            return True
        finally:
            self.staging.recycle(buf)

    def save_delta(self, name: str, payload: bytes) -> None:
        """Keep the last full copy in memory and write what has changed."""
        base = self.delta_base.get(name)
        if base is not None and base.used == len(payload):
            diff = bytes(a ^ b for a, b in zip(base.view(), payload))
            self.pool.submit(self._write_blob, f"{name}.delta", zlib.compress(diff))
            base.fill(memoryview(payload))
            return
        fresh = self.staging.checkout()  # leak: a payload of another length overwrites the base in the table
        fresh.fill(memoryview(payload))
        self.delta_base[name] = fresh

    def drop_deltas(self) -> None:
        for buf in self.delta_base.values():
            self.staging.recycle(buf)
        self.delta_base.clear()

    def _write_blob(self, name: str, blob: bytes) -> None:
        (self.dir / name).write_bytes(blob)

    # ---- a whole state dict ----------------------------------------------

    def save(self, step: int, state: dict) -> bool:
        if not self.lock.acquire():  # leak: the return for a paused writer leaves the lock file
            LOG.warning("step %d: manifest is locked by another job", step)
            return False
        if self.paused:
            LOG.info("step %d not saved, writer is paused", step)
            return False
        try:
            for name, tensor in state.items():
                self.save_shard(f"{step}-{name}", tensor)
            self._wait(step)
            manifest = {"step": step, "shards": sorted(state), "time": time.time()}
            self._write_blob(f"{step}.json", json.dumps(manifest).encode())
            return True
        finally:
            self.lock.release()

    def _wait(self, step: int) -> None:
        prefix = f"{step}-"
        mine = [f for n, f in self.futures.items() if n.startswith(prefix)]
        cf.wait(mine)
        self.futures = {n: f for n, f in self.futures.items() if not n.startswith(prefix)}

    def prune(self, keep: int) -> int:
        if not self.lock.acquire():  # clean: near miss, the early return inside the try passes finally
            return 0
        try:
            manifests = sorted(self.dir.glob("*.json"), key=lambda p: p.stat().st_mtime)
            if len(manifests) <= keep:
                return 0
            for path in manifests[:-keep]:
                path.unlink()
            return len(manifests) - keep
        finally:
            self.lock.release()

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        self.drop_deltas()
        if not self.staging.all_back(timeout=5.0):
            LOG.error("staging buffers are still out at close")

class Uploader(threading.Thread):
    """Sends finished files to the object store, several in flight."""

    def __init__(self, writer: CheckpointWriter, client, parallel: int = 2):
        super().__init__(name="uploader", daemon=True)
        self.writer = writer
        self.client = client
        self.tickets = threading.BoundedSemaphore(parallel)
        self.todo: list[pathlib.Path] = []
        self.halt = threading.Event()

    def run(self) -> None:
        while not self.halt.wait(0.5):
            while self.todo:
                self._start(self.todo.pop())

    def _start(self, path: pathlib.Path) -> None:
        self.tickets.acquire()  # leak: _failed() is the callback on error and does not release
        self.client.put_async(path, on_done=self._done, on_error=self._failed)

    def _done(self, path: pathlib.Path) -> None:
        LOG.info("uploaded %s", path)
        self.tickets.release()

    def _failed(self, path: pathlib.Path, exc: Exception) -> None:
        LOG.warning("upload of %s: %s", path, exc)
        self.todo.append(path)

    def upload_now(self, path: pathlib.Path) -> bool:
        if not self.tickets.acquire(timeout=30.0):  # clean: released in finally
            return False
        try:
            return self.client.put(path)
        finally:
            self.tickets.release()

def copy_step(src: CheckpointWriter, dst: CheckpointWriter, step: int) -> int:
    """Copy the shards of a step between directories with double buffering."""
    names = [p.name for p in src.dir.glob(f"{step}-*")]
    a = src.staging.checkout()  # leak: StagingExhausted of the second checkout is handled by giving up, with the first one held
    try:
        b = src.staging.checkout(timeout=10.0)  # clean: recycled at the end
    except StagingExhausted:
        return 0
    copied = 0
    for i, name in enumerate(names):
        buf = (a, b)[i % 2]
        buf.fill(memoryview((src.dir / name).read_bytes()))
        dst._write(name, buf)
        copied += buf.used
    src.staging.recycle(a)
    src.staging.recycle(b)
    return copied
