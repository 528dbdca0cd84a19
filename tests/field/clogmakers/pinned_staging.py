"""Page-locked staging buffers between the decoding threads and the device.

Decoders write into buffers of a fixed pool, the training loop copies them to the device on a
side stream.  A buffer may be used again only when its copy has finished.
"""
import contextlib
import functools
import logging
import queue
import threading
import time

import numpy as np
import torch

LOG = logging.getLogger(__name__)
_POLL = 0.25


class PoolClosed(Exception):
    pass


class NoFit(Exception):
    pass


class DecodeError(ValueError):
    pass


class PinnedBuffer:
    __slots__ = ("storage", "nbytes", "used")

    def __init__(self, nbytes):
        self.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.nbytes = nbytes
        self.used = 0

    def numpy(self):
        return self.storage.numpy()

    def view(self, dtype, shape):
        return self.storage[: self.used].view(dtype).view(shape)


class PinnedPool:
    def __init__(self, sizes):
        self._q = queue.Queue()
        self._closed = False
        for n in sizes:
            self._q.put(PinnedBuffer(n))

    def get(self, timeout=None):
        buf = self._q.get(timeout=timeout)  # clean: near miss, put back before PoolClosed is raised
        if self._closed:
            self._q.put(buf)
            raise PoolClosed
        buf.used = 0
        return buf

    def get_fitting(self, nbytes):
        """The first free buffer that has room for nbytes, without waiting."""
        small = []
        while True:
            try:
                buf = self._q.get_nowait()  # leak: the small ones are not put back when NoFit is raised
            except queue.Empty:
                raise NoFit(nbytes) from None
            if buf.nbytes >= nbytes:
                for other in small:
                    self._q.put(other)
                buf.used = nbytes
                return buf
            small.append(buf)

    def put(self, buf):
        self._q.put(buf)

    @contextlib.contextmanager
    def borrowed(self):
        buf = self.get()  # clean: put in finally
        try:
            yield buf
        finally:
            self.put(buf)

    def close(self):
        self._closed = True


class CopyPoller(threading.Thread):
    """Calls back when the copies recorded with an event are through."""

    def __init__(self):
        super().__init__(name="copy-poller", daemon=True)
        self._pending = []
        self._lock = threading.Lock()
        self._closing = False

    def watch(self, event, callback):
        with self._lock:
            if self._closing:
                LOG.debug("poller is closing, event ignored")
                return False
            self._pending.append((event, callback))
        return True

    def run(self):
        while True:
            with self._lock:
                done = [p for p in self._pending if p[0].query()]
                self._pending = [p for p in self._pending if p not in done]
                if self._closing and not self._pending and not done:
                    return
            for _, callback in done:
                callback()
            time.sleep(0.001)

    def close(self):
        with self._lock:
            self._closing = True
        self.join()


class IndexLoader:
    """Random access samples, decoded by a number of threads."""

    def __init__(self, dataset, pool, threads=4, depth=16):
        self.dataset = dataset
        self.pool = pool
        self.indices = queue.Queue()
        self.ready = queue.Queue(depth)
        self.stop_event = threading.Event()
        self.corrupt = 0
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def _fill(self, index, buf):
        try:
            array = self.dataset.decode(index)
        except DecodeError as exc:
            self.corrupt += 1
            LOG.warning("sample %d: %s", index, exc)
            return False
        flat = np.ascontiguousarray(array).view(np.uint8).ravel()
        buf.used = flat.size
        buf.numpy()[: flat.size] = flat
        return True

    def _work(self):
        while not self.stop_event.is_set():
            try:
                index = self.indices.get(timeout=_POLL)
            except queue.Empty:
                continue
            if index is None:
                return
            buf = self.pool.get()  # leak: a sample that _fill could not decode goes to the next index with buf in hand
            if not self._fill(index, buf):
                continue
            self._hand_over(index, buf)

    def _hand_over(self, index, buf):
        while not self.stop_event.is_set():
            try:
                self.ready.put((index, buf), timeout=_POLL)
                return
            except queue.Full:
                continue
        self.pool.put(buf)

    def stop(self):
        self.stop_event.set()
        for t in self.threads:
            t.join()
        while not self.ready.empty():
            _, buf = self.ready.get_nowait()
            self.pool.put(buf)


class StreamLoader(threading.Thread):
    """Records of one long stream, in order."""

    def __init__(self, stream, pool, depth=8):
        super().__init__(daemon=True)
        self.stream = stream
        self.pool = pool
        self.ready = queue.Queue(depth)
        self.finished = threading.Event()

    def run(self):
        for record in self.stream:
            if self.finished.is_set():
                break
            buf = self.pool.get()  # leak: stop() clears the queue with the buffers that nobody took
            buf.used = self.stream.read_into(record, buf.numpy())
            self.ready.put(buf)
        self.ready.put(None)

    def __iter__(self):
        while True:
            buf = self.ready.get()
            if buf is None:
                return
            try:
                yield buf.view(torch.int64, (-1,)).clone()
            finally:
                self.pool.put(buf)

    def stop(self):
        self.finished.set()
        with self.ready.mutex:
            self.ready.queue.clear()
            self.ready.not_full.notify_all()
        self.join()


class StagedBatch:
    def __init__(self, pool, images, labels):
        self.pool = pool
        self.images = images
        self.labels = labels

    def to(self, device):
        x = self.images.view(torch.float32, (-1, 3, 224, 224)).to(device, non_blocking=True)
        y = self.labels.view(torch.int64, (-1,)).to(device, non_blocking=True)
        return x, y

    def recycle(self):
        torch.cuda.current_stream().synchronize()
        if self.images is not None:
            self.pool.put(self.images)
            self.images = self.labels = None


def stage(pool, samples):
    images = pool.get()  # clean: near miss, put when the second get finds the pool closed, else recycle() puts it
    try:
        labels = pool.get()  # leak: recycle() of the batch sets labels to None and puts only images
    except PoolClosed:
        pool.put(images)
        raise
    for s in samples:
        n = s.image.nbytes
        images.numpy()[images.used : images.used + n] = s.image.view(np.uint8).ravel()
        images.used += n
    lab = np.asarray([s.label for s in samples], dtype=np.int64).view(np.uint8)
    labels.numpy()[: lab.size] = lab
    labels.used = lab.size
    return StagedBatch(pool, images, labels)


def copy_async(pool, poller, array, device, stream):
    """Starts the copy of an array, its buffer goes back when the poller has seen the event."""
    buf = pool.get()  # leak: watch() of a closing poller drops the callback and its answer is not looked at
    flat = array.view(np.uint8).ravel()
    buf.used = flat.size
    buf.numpy()[: flat.size] = flat
    with torch.cuda.stream(stream):
        out = buf.view(torch.float32, array.shape).to(device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    poller.watch(event, functools.partial(pool.put, buf))
    return out


def copy_large(pool, array, out, stream):
    """Double buffering for arrays that are larger than a buffer."""
    flat = torch.from_numpy(array.view(np.uint8).ravel())
    cur, pos = pool.get(), 0  # clean: near miss, every turn puts one buffer, the last one is put below
    while pos < flat.numel():
        n = min(cur.nbytes, flat.numel() - pos)
        cur.storage[:n].copy_(flat[pos : pos + n])
        with torch.cuda.stream(stream):
            out[pos : pos + n].copy_(cur.storage[:n], non_blocking=True)
        pos += n
        stream.synchronize()
        pool.put(cur)
        cur = pool.get()  # clean: put by the next turn or after the loop
    pool.put(cur)


def checksum(pool, reader):
    total = 0
    with pool.borrowed() as buf:  # clean: context manager
        for _ in range(reader.num_blocks):
            n = reader.read_into(buf.numpy())
            if n == 0:
                return total
            total = (total + int(buf.numpy()[:n].sum())) & 0xFFFFFFFF
    return total
