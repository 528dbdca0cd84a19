"""Shared-memory segments for the data loader workers.

A SegmentArena maps one big SharedMemory block and hands out fixed windows of
it. Workers write samples into windows, the trainer turns windows into tensors.
"""

import queue
from multiprocessing import shared_memory

import torch


class Window(object):
    __slots__ = ("index", "view", "owner")

    def __init__(self, index, view, owner):
        self.index = index
        self.view = view
        self.owner = owner

    def tensor(self, shape, dtype=torch.uint8):
        return torch.frombuffer(self.view, dtype=dtype).view(-1)[: shape.numel()].view(shape)

    def retire(self):
        self.owner._put(self.index)


class SegmentArena(object):
    def __init__(self, name, window_bytes, count):
        self.window_bytes = window_bytes
        self._shm = shared_memory.SharedMemory(name=name, create=True, size=window_bytes * count)
        self._bits = [False] * count

    def _window(self, i):
        lo = i * self.window_bytes
        return Window(i, self._shm.buf[lo:lo + self.window_bytes], self)

    def carve(self):
        for i, busy in enumerate(self._bits):
            if not busy:
                self._bits[i] = True
                return self._window(i)
        return None

    def carve_run(self, n):
        """n adjacent windows or None"""
        run = 0
        for i, busy in enumerate(self._bits):
            run = 0 if busy else run + 1
            if run == n:
                first = i - n + 1
                for k in range(first, i + 1):
                    self._bits[k] = True
                return [self._window(k) for k in range(first, i + 1)]
        return None

    def _put(self, i):
        self._bits[i] = False

    def destroy(self):
        self._shm.close()
        self._shm.unlink()


class WindowLease(object):
    """with WindowLease(arena) as w: ..."""

    def __init__(self, arena, keep_on=()):
        self.arena = arena
        self.keep_on = keep_on
        self.window = None

    def __enter__(self):
        self.window = self.arena.carve()  # leak: __exit__ returns early for the exception types of keep_on
        return self.window

    def __exit__(self, etype, exc, tb):
        if etype is not None and issubclass(etype, tuple(self.keep_on)):
            return True
        if self.window is not None:
            self.window.retire()
            self.window = None
        return False


class ScratchWindow(object):
    def __init__(self, arena):
        self._arena = arena

    def __enter__(self):
        w = self._arena.carve()  # clean: near miss, kept as self._w, and every way out of __exit__ retires it
        self._w = w
        return w

    def __exit__(self, etype, exc, tb):
        w, self._w = self._w, None
        if w is None:
            return False
        w.retire()
        if etype is BufferError:
            return True
        return False


class Worker(object):
    def __init__(self, arena, dataset, outq):
        self.arena = arena
        self.dataset = dataset
        self.outq = outq
        self.skipped = 0

    def _fill(self, window, raw):
        n = len(raw)
        window.view[:n] = raw
        return n

    def emit(self, idx):
        raw = self.dataset.read(idx)
        w = self.arena.carve()  # leak: a sample larger than a window is skipped with the window taken
        if w is None:
            return False
        if len(raw) > self.arena.window_bytes:
            self.skipped += 1
            return False
        n = self._fill(w, raw)
        self.outq.put((w, n))
        return True

    def emit_or_drop(self, idx):
        raw = self.dataset.read(idx)
        w = self.arena.carve()  # clean: near miss, retired when the queue is full and otherwise sent to the consumer
        if w is None:
            return False
        n = self._fill(w, raw[: self.arena.window_bytes])
        try:
            self.outq.put_nowait((w, n))
        except queue.Full:
            w.retire()
            return False
        return True

    def emit_clip(self, idx, frames):
        raws = self.dataset.frames(idx, frames)
        run = self.arena.carve_run(len(raws))  # leak: blank frames are not sent and their windows are not retired
        if run is None:
            return 0
        sent = 0
        for w, raw in zip(run, raws):
            if raw is None:
                continue
            self.outq.put((w, self._fill(w, raw)))
            sent += 1
        return sent

    def checksum(self, idx):
        with ScratchWindow(self.arena) as w:  # clean: context manager
            if w is None:
                return None
            n = self._fill(w, self.dataset.read(idx))
            return sum(w.view[:n]) & 0xFFFFFFFF


class Trainer(object):
    def __init__(self, arena, inq):
        self.arena = arena
        self.inq = inq
        self.held = []

    def samples(self, shape):
        while True:
            item = self.inq.get()
            if item is None:
                return
            w, n = item
            t = w.tensor(shape).clone()
            w.retire()
            yield t

    def stage(self, k):
        for _ in range(k):
            w = self.arena.carve()  # clean: appended to self.held, which drain empties
            if w is None:
                break
            self.held.append(w)
        return len(self.held)

    def drain(self):
        while self.held:
            self.held.pop().retire()

    def scratch_mean(self, shape):
        w = self.arena.carve()  # clean: retired before the tensor is returned
        if w is None:
            return None
        t = w.tensor(shape).float().mean()
        w.retire()
        return t

    def grow_until(self, shape, ok):
        w = self.arena.carve()  # clean: near miss, retired inside the loop before the name is rebound
        while w is not None and not ok(w.tensor(shape)):
            w.retire()
            w = self.arena.carve()  # clean: retired by the next turn or after the loop
        if w is not None:
            w.retire()
            return True
        return False

    def find_aligned(self, align):
        w = self.arena.carve()  # leak: rebound by the next carve when its index is not aligned
        while w is not None and w.index % align:
            w = self.arena.carve()  # leak: rebound again while the index is not aligned
        return w

    def warm(self, shape):
        w = self.find_aligned(8)  # clean: retired after the fill
        if w is None:
            return
        w.tensor(shape).zero_()
        w.retire()
