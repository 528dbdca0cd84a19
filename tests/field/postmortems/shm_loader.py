"""Data loader whose workers hand batches over in shared memory segments."""
from __future__ import annotations

import queue
import threading
from multiprocessing import shared_memory


class Segment:
    def __init__(self, name, size):
        self.name = name
        self.size = size
        self.buf = bytearray(size)

    def write(self, payload):
        if len(payload) > self.size:
            return False
        self.buf[:len(payload)] = payload
        return True


class SegmentPool:
    def __init__(self, n, size):
        self._q = queue.LifoQueue()
        for i in range(n):
            self._q.put(Segment(f"seg{i}", size))

    def lend(self, timeout=None):
        try:
            return self._q.get(timeout=timeout)  # clean: lent to the caller
        except queue.Empty:
            return None

    def take_back(self, seg):
        self._q.put(seg)


class Collator:
    def __init__(self, pad=0):
        self.pad = pad

    def __call__(self, samples):
        width = max((len(s) for s in samples), default=0)
        return b"".join(bytes(s) + bytes([self.pad]) * (width - len(s)) for s in samples)


class Worker:
    def __init__(self, dataset, pool, collate, out):
        self.dataset = dataset
        self.pool = pool
        self.collate = collate
        self.out = out
        self.errors = []

    def fetch(self, indices):
        seg = self.pool.lend(timeout=5)  # leak: the handler records the error and forgets the segment
        if seg is None:
            return None
        try:
            payload = self.collate([self.dataset[i] for i in indices])
        except IndexError as exc:
            self.errors.append(exc)
            return None
        if not seg.write(payload):
            self.pool.take_back(seg)
            return None
        return seg

    def fetch_safe(self, indices):
        seg = self.pool.lend(timeout=5)  # clean: near miss, handler and oversize both take it back, else the caller has it
        if seg is None:
            return None
        try:
            payload = self.collate([self.dataset[i] for i in indices])
        except IndexError as exc:
            self.errors.append(exc)
            self.pool.take_back(seg)
            return None
        if not seg.write(payload):
            self.pool.take_back(seg)
            return None
        return seg

    def loop(self, batches, stop):
        for indices in batches:
            seg = self.fetch_safe(indices)  # leak: the stop flag ends the worker with a filled segment in hand
            if seg is None:
                continue
            if stop.is_set():
                break
            self.out.put(seg)

    def loop_stop_first(self, batches, stop):
        for indices in batches:
            if stop.is_set():
                break
            seg = self.fetch_safe(indices)  # clean: near miss, the flag is read before, the queue owns it after
            if seg is None:
                continue
            self.out.put(seg)


class LoaderIter:
    def __init__(self, pool, out):
        self.pool = pool
        self.out = out
        self.current = None
        self.reorder = {}

    def next_batch(self):
        seg = self.out.get()  # clean: near miss, the segment of the turn before is taken back, close() takes the last
        if self.current is not None:
            self.pool.take_back(self.current)
        self.current = seg
        return bytes(seg.buf)

    def park(self, order, stop):
        seg = self.out.get()  # leak: close() forgets the segments parked for reordering
        self.reorder[order] = seg
        return stop.is_set()

    def peek_len(self):
        seg = self.out.get()  # leak: an empty first byte returns without handing the segment on
        if seg.buf[0] == 0:
            return 0
        n = seg.size
        self.pool.take_back(seg)
        return n

    def close(self):
        if self.current is not None:
            self.pool.take_back(self.current)
            self.current = None
        while not self.out.empty():
            self.pool.take_back(self.out.get())  # clean: taken back in the same statement
        self.reorder.clear()


def attach_meta(name, verify):
    shm = shared_memory.SharedMemory(name=name)  # leak: a bad magic number returns with the mapping open
    if verify and bytes(shm.buf[:4]) != b"BTCH":
        return None
    meta = bytes(shm.buf[4:64])
    shm.close()
    return meta


def attach_len(name):
    shm = shared_memory.SharedMemory(name=name)  # clean: near miss, closed in the finally
    try:
        if bytes(shm.buf[:4]) != b"BTCH":
            return -1
        return shm.size
    finally:
        shm.close()


def iter_segments(pool, payloads):
    for payload in payloads:
        seg = pool.lend()  # clean: near miss, the finally round the yield takes it back even if abandoned
        if seg is None:
            return
        try:
            if seg.write(payload):
                yield seg
        finally:
            pool.take_back(seg)


def iter_views(pool, payloads):
    for payload in payloads:
        seg = pool.lend()  # leak: payloads too large for a segment are skipped with it lent out
        if seg is None:
            return
        if not seg.write(payload):
            continue
        yield bytes(seg.buf[:len(payload)])
        pool.take_back(seg)


def start_workers(dataset, pool, plan, out):
    stop = threading.Event()
    threads = []
    for batches in plan:
        worker = Worker(dataset, pool, Collator(), out)
        threads.append(threading.Thread(target=worker.loop_stop_first, args=(batches, stop)))
    for t in threads:
        t.start()
    return stop, threads
