"""Tensors between processes of one host, through POSIX shared memory.

The producer rents a region, writes an array and sends a small header over a pipe; the
consumer attaches the region by name, reads it, closes it and acknowledges the sequence
number, whereupon the producer gives the region back to its pool.
"""
import contextlib
import itertools
import os
import zlib
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing import shared_memory as sm

import numpy as np

PAGE = 4096


class CorruptFrame(RuntimeError):
    pass


@dataclass(frozen=True)
class Header:
    seq: int
    name: str
    shape: tuple
    dtype: str
    crc: int

    @property
    def nbytes(self):
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def size_class(n):
    return max(PAGE, 1 << (n - 1).bit_length())


def create(nbytes, tag="t"):
    name = f"{tag}-{os.getpid()}-{next(create.ids)}"
    return sm.SharedMemory(name=name, create=True, size=size_class(nbytes))  # clean: handed to the caller


create.ids = itertools.count()


def attach(name):
    return sm.SharedMemory(name=name)  # clean: handed to the caller


def destroy(seg):
    seg.close()
    seg.unlink()


class RegionPool:
    """Keeps segments by size class; rent() and give_back()."""

    def __init__(self, keep=8):
        self.keep = keep
        self._shelf = defaultdict(list)
        self.created = 0
        self.reused = 0

    def rent(self, nbytes):
        want = size_class(nbytes)
        shelf = self._shelf[want]
        if shelf:
            seg = shelf.pop()  # leak: one that turns out too small is neither destroyed nor put back when a new one takes its place
            if seg.size >= want:
                self.reused += 1
                return seg
        self.created += 1
        return create(nbytes)  # clean: handed to the caller

    def give_back(self, seg):
        shelf = self._shelf[size_class(seg.size)]
        if len(shelf) >= self.keep:
            destroy(seg)
        else:
            shelf.append(seg)

    def close(self):
        for shelf in self._shelf.values():
            while shelf:
                destroy(shelf.pop())  # clean: destroyed at once


class Producer:
    def __init__(self, pipe, pool=None, max_pending=32):
        self.pipe = pipe
        self.pool = pool or RegionPool()
        self.max_pending = max_pending
        self._pending = {}
        self._fanout = {}
        self._seq = itertools.count()
        self._front = self._back = None

    def _write(self, seg, arr):
        view = np.ndarray(arr.shape, arr.dtype, buffer=seg.buf)
        np.copyto(view, arr)
        head = Header(next(self._seq), seg.name, arr.shape, arr.dtype.str, zlib.crc32(arr.tobytes()))
        del view
        return head

    def send(self, arr):
        if len(self._pending) >= self.max_pending:
            self.collect()
        seg = self.pool.rent(arr.nbytes)  # clean: near miss, kept under its number until the consumer acknowledges or close()
        head = self._write(seg, arr)
        self._pending[head.seq] = seg
        self.pipe.send(head)
        return head.seq

    def try_send(self, arr):
        seg = self.pool.rent(arr.nbytes)  # leak: with too many pending the method returns and the segment is lost
        head = self._write(seg, arr)
        if len(self._pending) >= self.max_pending:
            return None
        self._pending[head.seq] = seg
        self.pipe.send(head)
        return head.seq

    def collect(self):
        while self.pipe.poll():
            seq = self.pipe.recv()
            seg = self._pending.pop(seq, None)
            if seg is not None:
                self.pool.give_back(seg)

    def broadcast(self, arr, peers):
        """One region each, because peers write their results in place."""
        sent = 0
        for peer in peers:
            seg = self.pool.rent(arr.nbytes)  # leak: for a peer that is gone the handler continues with the next
            head = self._write(seg, arr)
            try:
                peer.send(head)
            except (BrokenPipeError, EOFError):
                continue
            self._fanout[head.seq] = seg
            sent += 1
        return sent

    def harvest(self, seq, shape, dtype):
        seg = self._fanout.pop(seq)
        try:
            return np.ndarray(shape, dtype, buffer=seg.buf).copy()
        finally:
            self.pool.give_back(seg)

    def flip(self, nbytes):
        """Double buffering for weights: the old front is kept for one more turn."""
        if self._back is not None:
            self.pool.give_back(self._back)
        self._back = self._front
        self._front = self.pool.rent(nbytes)  # clean: near miss, goes to the back at the next turn and from there to the pool
        return self._front

    def close(self):
        for table in (self._pending, self._fanout):
            while table:
                self.pool.give_back(table.popitem()[1])
        for seg in filter(None, (self._front, self._back)):
            self.pool.give_back(seg)
        self._front = self._back = None
        self.pool.close()


class Mapping:
    """A counted view of a foreign segment; the last user closes it."""

    def __init__(self, name):
        self.seg = attach(name)  # clean: near miss, drop() closes it at the last user
        self.users = 1

    def keep(self):
        self.users += 1
        return self

    def drop(self):
        self.users -= 1
        if not self.users:
            self.seg.close()


class Consumer:
    def __init__(self, pipe):
        self.pipe = pipe
        self._maps = {}

    def fetch(self, verify=True):
        head = self.pipe.recv()
        seg = attach(head.name)  # leak: CorruptFrame is raised while the segment is mapped
        data = bytes(seg.buf[:head.nbytes])
        if verify and zlib.crc32(data) != head.crc:
            raise CorruptFrame(head.seq)
        seg.close()
        self.pipe.send(head.seq)
        return np.frombuffer(data, head.dtype).reshape(head.shape)

    def fetch_or_skip(self):
        try:
            return self.fetch()
        except CorruptFrame as exc:
            self.pipe.send(exc.args[0])
            return None

    def frames(self):
        """Views without a copy, each valid until the next one is asked for."""
        while True:
            head = self.pipe.recv()
            if head is None:
                return
            seg = attach(head.name)  # leak: first_match() breaks out while the generator stands at the yield
            yield np.ndarray(head.shape, head.dtype, buffer=seg.buf)
            seg.close()
            self.pipe.send(head.seq)

    def first_match(self, pred):
        for frame in self.frames():
            if pred(frame):
                break
        else:
            return None
        return frame.copy()

    def stack(self, n):
        """The next n frames as one array."""
        heads = [self.pipe.recv() for _ in range(n)]
        with contextlib.ExitStack() as stack:
            views = []
            for head in heads:
                seg = attach(head.name)  # clean: near miss, the exit stack closes it
                stack.callback(seg.close)
                views.append(np.array(np.ndarray(head.shape, head.dtype, buffer=seg.buf)))
        for head in heads:
            self.pipe.send(head.seq)
        return np.stack(views)

    def mapping(self, name):
        if name in self._maps:
            return self._maps[name].keep()  # clean: the user count is raised for the caller
        m = self._maps[name] = Mapping(name)  # clean: handed to the caller and remembered, forget() removes it
        return m

    def forget(self, m):
        m.drop()
        if not m.users:
            self._maps.pop(m.seg.name, None)

    def row(self, name, i, width):
        m = self.mapping(name)  # clean: forgotten in the finally
        try:
            return np.frombuffer(m.seg.buf, np.float32, width, i * width * 4).copy()
        finally:
            self.forget(m)
