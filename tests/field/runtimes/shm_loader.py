"""Shared-memory segments that carry batches from loader workers to the trainer."""
import queue
import threading
from dataclasses import dataclass
from typing import Optional

import numpy as np


class Segment:
    def __init__(self, name, nbytes):
        self.name = name
        self.array = np.zeros(nbytes, dtype=np.uint8)


class SegmentPool:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._q = queue.Queue()
        self._quarantine = []
        for i in range(count):
            self._q.put(Segment(f"seg{i}", nbytes))

    def take(self, timeout=None) -> Optional[Segment]:
        try:
            return self._q.get(timeout=timeout)  # clean: handed on, the handler is for an empty queue
        except queue.Empty:
            return None

    def take_nowait(self) -> Optional[Segment]:
        try:
            seg = self._q.get_nowait()  # leak: a segment whose size was changed is dropped and None returned
        except queue.Empty:
            return None
        if seg.array.nbytes != self.nbytes:
            return None
        return seg

    def give(self, seg):
        self._q.put(seg)

    def scrub(self):
        pending = []
        while True:
            try:
                seg = self._q.get_nowait()  # clean: near miss, everything taken is put back after the loop
            except queue.Empty:
                break
            seg.array.fill(0)
            pending.append(seg)
        for seg in pending:
            self._q.put(seg)


@dataclass
class Batch:
    index: int
    segment: Segment
    used: int


class Worker(threading.Thread):
    def __init__(self, dataset, indices, pool, out, stop):
        super().__init__(daemon=True)
        self._dataset = dataset
        self._indices = indices
        self._pool = pool
        self._out = out
        self._stop_event = stop

    def run(self):
        while not self._stop_event.is_set():
            index = self._indices.get()
            if index is None:
                break
            seg = self._pool.take()  # clean: near miss, the batch on the queue carries it to the consumer
            n = self._fill(seg, index)
            self._out.put(Batch(index, seg, n))

    def _fill(self, seg, index):
        raw = self._dataset[index]
        seg.array[: raw.nbytes] = raw.view(np.uint8).ravel()
        return raw.nbytes


class FilteringWorker(Worker):
    def __init__(self, *args, keep):
        super().__init__(*args)
        self._keep = keep

    def run(self):
        while not self._stop_event.is_set():
            index = self._indices.get()
            if index is None:
                break
            seg = self._pool.take()  # leak: a rejected sample goes round the loop with its segment
            n = self._fill(seg, index)
            if not self._keep(seg.array[:n]):
                continue
            self._out.put(Batch(index, seg, n))


class Loader:
    def __init__(self, pool, ready):
        self._pool = pool
        self._ready = ready
        self._reorder = {}
        self._spill = []
        self._next = 0

    def __next__(self):
        while self._next not in self._reorder:
            batch = self._ready.get()
            self._reorder[batch.index] = batch
        batch = self._reorder.pop(self._next)
        self._next += 1
        try:
            return batch.segment.array[: batch.used].copy()
        finally:
            self._pool.give(batch.segment)

    def stash(self, payload):
        seg = self._pool.take_nowait()  # leak: the spill list is cleared by close without giving its segments
        if seg is None:
            return False
        seg.array[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self._spill.append((seg, len(payload)))
        return True

    def close(self):
        for batch in self._reorder.values():
            self._pool.give(batch.segment)
        while not self._ready.empty():
            self._pool.give(self._ready.get().segment)
        self._reorder.clear()
        self._spill.clear()


def concat(pool, parts):
    seg = pool.take(timeout=5.0)  # clean: near miss, while-else and break both reach the give
    if seg is None:
        return b"".join(parts)
    used = 0
    i = 0
    while i < len(parts):
        if used + len(parts[i]) > pool.nbytes:
            break
        seg.array[used : used + len(parts[i])] = np.frombuffer(parts[i], dtype=np.uint8)
        used += len(parts[i])
        i += 1
    else:
        i = len(parts)
    joined = seg.array[:used].tobytes()
    pool.give(seg)
    return joined + b"".join(parts[i:])


def transcode(pool, src, lut):
    scratch = pool.take(timeout=1.0)  # leak: the rebinding below loses this one when the source is large
    if scratch is None:
        return None
    if len(src) > scratch.array.nbytes // 2:
        scratch = pool.take(timeout=1.0)  # clean: given at the end
        if scratch is None:
            return None
    scratch.array[: len(src)] = lut[np.frombuffer(src, dtype=np.uint8)]
    out = scratch.array[: len(src)].tobytes()
    pool.give(scratch)
    return out
