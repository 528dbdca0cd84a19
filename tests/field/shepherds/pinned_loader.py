"""Loader that stages samples in page-locked host buffers and copies them to the device on a side stream."""
from __future__ import annotations

import io
import queue
import threading
from contextlib import contextmanager

import numpy as np
import torch

class DecodeError(ValueError):
    pass

class PinnedBuffers:
    """`count` pinned byte buffers. get() blocks, put() wakes one waiter."""

    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self.count = count
        self._q: queue.Queue = queue.Queue()
        for _ in range(count):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def get(self, timeout=None):
        return self._q.get(timeout=timeout)  # clean: returned to the caller

    def get_nowait(self):
        try:
            return self._q.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def put(self, buf):
        assert buf.numel() == self.nbytes
        self._q.put(buf)

    @contextmanager
    def borrowed(self):
        buf = self.get()  # clean: put back in finally
        try:
            yield buf
        finally:
            self.put(buf)

class Staged:
    """A batch in a pinned buffer. recycle() must be called once the copy is done."""

    def __init__(self, buf, pool, shapes):
        self.buf = buf
        self._pool = pool
        self.shapes = shapes

    def recycle(self):
        if self.buf is not None:
            self._pool.put(self.buf)
            self.buf = None

    def tensors(self):
        off = 0
        for shape in self.shapes:
            n = int(np.prod(shape))
            yield self.buf[off:off + n].view(*shape)
            off += n

def decode(record: bytes) -> np.ndarray:
    if record[:4] != b"\x93NUM":
        raise DecodeError("not an array")
    return np.load(io.BytesIO(record), allow_pickle=False)

def pack(buf, arrays):
    """Copy arrays one behind the other; returns their shapes, None when they do not fit."""
    off, shapes = 0, []
    view = buf.numpy()
    for a in arrays:
        flat = a.reshape(-1).view(np.uint8)
        if off + flat.size > view.size:
            return None
        view[off:off + flat.size] = flat
        off += flat.size
        shapes.append(a.shape)
    return shapes

class Stager(threading.Thread):
    """Reads records, fills pinned buffers, queues them for the consumer."""

    def __init__(self, source, pool, batch_size, depth=4, drop_last=True):
        super().__init__(daemon=True, name="stager")
        self.source = source
        self.pool = pool
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.out: queue.Queue = queue.Queue(maxsize=depth)
        self.stop_flag = threading.Event()
        self.skipped = 0

    def run(self):
        batch = []
        for record in self.source:
            if self.stop_flag.is_set():
                break
            try:
                batch.append(decode(record))
            except DecodeError:
                self.skipped += 1
                continue
            if len(batch) == self.batch_size:
                self._emit(batch)
                batch = []
        if batch and not self.drop_last:
            self._emit(batch)
        self.out.put(None)

    def _emit(self, arrays):
        buf = self.pool.get()  # leak: a batch that does not fit returns with the buffer
        shapes = pack(buf, arrays)
        if shapes is None:
            self.skipped += len(arrays)
            return
        self.out.put(Staged(buf, self.pool, shapes))

    def close(self):
        self.stop_flag.set()
        # empty the queue so that a blocked put() comes back
        while self.is_alive() or not self.out.empty():
            try:
                item = self.out.get(timeout=0.1)  # clean: recycled at once
            except queue.Empty:
                continue
            if item is not None:
                item.recycle()
        self.join()

class DeviceCopier:
    def __init__(self, device, pool):
        self.device = device
        self.pool = pool
        self.stream = torch.cuda.Stream(device)
        self._inflight = []

    def upload(self, staged):
        with torch.cuda.stream(self.stream):
            out = [t.to(self.device, non_blocking=True) for t in staged.tensors()]
        done = torch.cuda.Event()
        done.record(self.stream)
        self._inflight.append((done, staged))
        return out

    def collect(self):
        """Recycle what has been copied."""
        still = []
        for done, staged in self._inflight:
            if done.query():
                staged.recycle()
            else:
                still.append((done, staged))
        self._inflight = still

    def upload_bytes(self, blob: bytes):
        """One-off upload of a blob, synchronous."""
        with self.pool.borrowed() as buf:  # clean: the return is inside the with block
            n = len(blob)
            if n > buf.numel():
                return torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(self.device)
            buf[:n] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            return buf[:n].to(self.device)

    def try_upload(self, array):
        buf = self.pool.get_nowait()  # clean: the early return is where there is none
        if buf is None:
            return None
        shapes = pack(buf, [array])
        staged = Staged(buf, self.pool, shapes or [])
        if not shapes:
            staged.recycle()
            return None
        return self.upload(staged)

    def flush(self):
        self.stream.synchronize()
        self.collect()

class Replay:
    """Keeps the last batch so that a step with a NaN can be run once more."""

    def __init__(self, pool):
        self.pool = pool
        self.kept = None

    def keep(self, staged):
        copy = self.pool.get()  # leak: each keep() rebinds self.kept, the buffer before it is not recycled
        copy.copy_(staged.buf)
        self.kept = Staged(copy, self.pool, list(staged.shapes))

    def drop(self):
        if self.kept is not None:
            self.kept.recycle()
            self.kept = None

def prefetch(stager, copier):
    """Generator of device batches, one batch ahead."""
    ahead = None
    while True:
        staged = stager.out.get()  # clean: near miss, upload() moves it to the in-flight list
        if staged is None:
            break
        tensors = copier.upload(staged)
        copier.collect()
        if ahead is not None:
            yield ahead
        ahead = tensors
    if ahead is not None:
        yield ahead
    copier.flush()

def validate(stager, limit, check):
    """Run `check` over the first batches without a device."""
    bad = 0
    for i in range(limit):
        staged = stager.out.get()  # leak: an empty batch leaves through continue with its buffer
        if staged is None:
            break
        if not staged.shapes:
            continue
        try:
            for t in staged.tensors():
                if not check(t):
                    bad += 1
                    break
        finally:
            staged.recycle()
    return bad

def calibrate(pool, sizes, clock):
    """Time host copies; `sizes` are byte counts."""
    times = {}
    src = pool.get()  # clean: put back after the loop
    for n in sizes:
        dst = pool.get_nowait()  # leak: the break for a size over the limit skips the put
        if dst is None:
            break
        if n > pool.nbytes:
            break
        t0 = clock()
        dst[:n].copy_(src[:n])
        times[n] = clock() - t0
        pool.put(dst)
    pool.put(src)
    return times

def snapshot_first(stager, path):
    staged = stager.out.get()  # leak: the OSError that is handled returns before recycle()
    if staged is None:
        return False
    try:
        np.save(path, staged.buf.numpy())
    except OSError:
        return False
    staged.recycle()
    return True
