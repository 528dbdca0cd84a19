"""Samples travel from the workers to the training process through cells of shared memory."""
import logging
import random
import struct
import threading
from collections import deque
from multiprocessing import shared_memory

import numpy as np

log = logging.getLogger("shmring")

VERSION = 3
HEADER = struct.Struct("<III")


class CorruptSample(Exception):
    pass


class Ring:
    """A cell is empty, being written, full or being read."""

    def __init__(self, name, cells, cell_bytes):
        self._shm = shared_memory.SharedMemory(name=name, create=True, size=HEADER.size + cells * cell_bytes)  # clean: close() closes and unlinks it
        HEADER.pack_into(self._shm.buf, 0, VERSION, cells, cell_bytes)
        self._cell_bytes = cell_bytes
        self._lock = threading.Lock()
        self._idx = deque(range(cells))
        self._full = deque()
        self._fill = [0] * cells
        self._empties = threading.Semaphore(cells)
        self._fulls = threading.Semaphore(0)
        self.paused = False

    def view(self, cell):
        at = HEADER.size + cell * self._cell_bytes
        return self._shm.buf[at:at + self._cell_bytes]

    def claim_write(self, timeout=1.0):
        if not self._empties.acquire(timeout=timeout):  # leak: in a paused ring None is returned with the permit taken
            return None
        with self._lock:
            if self.paused:
                return None
            return self._idx.popleft()  # clean: goes to the caller

    def publish(self, cell, nbytes):
        with self._lock:
            self._fill[cell] = nbytes
            self._full.append(cell)
        self._fulls.release()

    def abandon(self, cell):
        with self._lock:
            self._idx.append(cell)
        self._empties.release()

    def claim_read(self, timeout=1.0):
        if not self._fulls.acquire(timeout=timeout):  # clean: near miss, counts the full cells, and publish() is what releases it
            return None
        with self._lock:
            return self._full.popleft()  # clean: goes to the caller

    free = abandon

    def array(self, cell, dtype=np.float32):
        return np.frombuffer(self.view(cell)[: self._fill[cell]], dtype=dtype)

    def close(self):
        self._shm.close()
        self._shm.unlink()


def produce(ring, dataset, indices, stop):
    written = 0
    for i in indices:
        if stop.is_set():
            break
        cell = ring.claim_write()  # leak: a corrupt sample is skipped with its cell neither published nor abandoned
        if cell is None:
            continue
        try:
            nbytes = dataset.encode_into(i, ring.view(cell))
        except CorruptSample as e:
            log.warning("sample %d: %s", i, e)
            continue
        ring.publish(cell, nbytes)
        written += 1
    return written


def produce_padded(ring, dataset, indices, pad):
    for i in indices:
        cell = ring.claim_write(timeout=None)  # clean: near miss, published in the finally, a corrupt sample with the padding
        if cell is None:
            return
        nbytes = 0
        try:
            nbytes = dataset.encode_into(i, ring.view(cell))
        except CorruptSample:
            ring.view(cell)[: len(pad)] = pad
            nbytes = len(pad)
        finally:
            ring.publish(cell, nbytes)


class Reader:
    """Iterates over views; a view is good until the next one is asked for."""

    def __init__(self, ring):
        self._ring = ring
        self._cell = None
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._drop()
        self._cell = self._ring.claim_read()  # clean: near miss, the next __next__() or close() frees it
        if self._cell is None:
            raise StopIteration
        self.count += 1
        return self._ring.array(self._cell)

    def _drop(self):
        cell, self._cell = self._cell, None
        if cell is not None:
            self._ring.free(cell)

    def close(self):
        self._drop()


def running_mean(ring, limit):
    reader = Reader(ring)
    total = 0.0
    try:
        for arr in reader:  # clean: the reader frees as it goes, and close() the last
            total += float(arr.mean())
            if reader.count >= limit:
                break
    finally:
        reader.close()
    return total / max(1, reader.count)


def batches(ring, collate, size):
    held = []
    while True:
        cell = ring.claim_read()  # clean: near miss, held for the batch and freed in the finally or after the loop
        if cell is None:
            break
        held.append(cell)
        if len(held) == size:
            try:
                yield collate([ring.array(c) for c in held])
            finally:
                for c in held:
                    ring.free(c)
                held = []
    for c in held:
        ring.free(c)


class ShuffleWindow:
    """Holds k cells and gives out a random one for every new one."""

    def __init__(self, ring, k, seed=0):
        self._ring, self._k = ring, k
        self._cells = []
        self._rng = random.Random(seed)

    def feed(self):
        """A cell to be freed by the caller, or None while the window fills."""
        cell = self._ring.claim_read()  # leak: reset() empties the window without freeing its cells
        if cell is None:
            return None
        if len(self._cells) < self._k:
            self._cells.append(cell)
            return None
        j = self._rng.randrange(self._k)
        out, self._cells[j] = self._cells[j], cell
        return out

    def reset(self, seed):
        self._cells = []
        self._rng = random.Random(seed)

    def drain(self):
        while self._cells:
            yield self._cells.pop()  # clean: goes to the consumer


def train_epoch(ring, window, step, n, epoch, last):
    window.reset(epoch)
    for _ in range(n):
        cell = window.feed()  # clean: freed in the finally, when there is one
        if cell is None:
            continue
        try:
            step(ring.array(cell))
        finally:
            ring.free(cell)
    if not last:
        return
    for cell in window.drain():  # clean: freed in the body
        try:
            step(ring.array(cell))
        finally:
            ring.free(cell)


class WriterTable:
    def __init__(self, ring):
        self._ring = ring
        self._open = {}

    def begin(self, worker):
        cell = self._ring.claim_write()  # leak: a worker that begins again before its commit overwrites its entry
        if cell is None:
            return -1
        self._open[worker] = cell
        return cell

    def commit(self, worker, nbytes):
        self._ring.publish(self._open.pop(worker), nbytes)

    def lost(self, worker):
        cell = self._open.pop(worker, None)
        if cell is not None:
            self._ring.abandon(cell)


def inspect(name):
    shm = shared_memory.SharedMemory(name=name)  # leak: another version of the layout returns before the close
    version, cells, cell_bytes = HEADER.unpack_from(shm.buf, 0)
    if version != VERSION:
        log.error("%s has version %d, not %d", name, version, VERSION)
        return 2
    print(f"{name}: {cells} cells of {cell_bytes} bytes")
    shm.close()
    return 0


def serve(name, dataset, workers, step, epochs=1):
    ring = Ring(name, cells=64, cell_bytes=1 << 20)  # clean: closed in the finally
    stop = threading.Event()
    try:
        for w in range(workers):
            part = range(w, len(dataset), workers)
            threading.Thread(target=produce, args=(ring, dataset, part, stop), daemon=True).start()
        window = ShuffleWindow(ring, 16)
        for epoch in range(epochs):
            train_epoch(ring, window, step, len(dataset), epoch, last=epoch == epochs - 1)
    finally:
        stop.set()
        ring.close()
