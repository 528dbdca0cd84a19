"""Reading of tokenised shards for the data loader.

A shard is opened once and shared by reference count; the cache keeps a few idle
descriptors around because opening on the parallel file system is slow.
"""
import os
import random
import struct
import threading
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np

HEADER = struct.Struct("<4sIQ")


class Shard:
    __slots__ = ("path", "fd", "refs", "n_tokens", "offset")

    def __init__(self, path, fd, n_tokens, offset):
        self.path = path
        self.fd = fd
        self.refs = 0
        self.n_tokens = n_tokens
        self.offset = offset

    def read(self, start, count):
        raw = os.pread(self.fd, count * 4, self.offset + start * 4)
        return np.frombuffer(raw, dtype=np.uint32)


class BadShard(Exception):
    pass


def _open_shard(path):
    fd = os.open(path, os.O_RDONLY)  # leak: not closed when the magic is wrong
    head = os.pread(fd, HEADER.size, 0)
    magic, version, n = HEADER.unpack(head)
    if magic != b"TOKS":
        raise BadShard(path)
    return Shard(path, fd, n, HEADER.size)


class ShardCache:
    """pin() / unpin() count users; idle shards are closed oldest first."""

    def __init__(self, max_idle=16):
        self._mu = threading.Lock()
        self._open = OrderedDict()
        self.max_idle = max_idle

    def pin(self, path):
        with self._mu:
            s = self._open.get(path)
            if s is None:
                s = _open_shard(path)  # clean: kept in _open, which _evict() and close() close
                self._open[path] = s
            s.refs += 1
            self._open.move_to_end(path)
            return s

    def pin_if_open(self, path):
        with self._mu:
            s = self._open.get(path)
            if s is not None:
                s.refs += 1
            return s

    def unpin(self, s):
        with self._mu:
            s.refs -= 1
            if s.refs == 0:
                self._evict()

    def _evict(self):
        idle = [p for p, s in self._open.items() if s.refs == 0]
        for p in idle[: max(0, len(idle) - self.max_idle)]:
            os.close(self._open.pop(p).fd)

    def close(self):
        with self._mu:
            for s in self._open.values():
                os.close(s.fd)
            self._open.clear()

    @contextmanager
    def pinned(self, path):
        s = self.pin(path)  # clean: unpinned in finally
        try:
            yield s
        finally:
            self.unpin(s)


def sample_window(cache, path, length, rng):
    with cache.pinned(path) as s:  # clean: context manager
        if s.n_tokens <= length:
            return s.read(0, s.n_tokens)
        return s.read(rng.randrange(s.n_tokens - length), length)


def first_match(cache, paths, token):
    """Index of the first shard which contains the token near its start."""
    for i, p in enumerate(paths):
        s = cache.pin(p)  # leak: returns on a hit without unpin
        if (s.read(0, 1024) == token).any():
            return i
        cache.unpin(s)
    return -1


def peek(cache, path):
    s = cache.pin_if_open(path)  # clean: None is no pin and the other case is unpinned
    if s is None:
        return None
    try:
        return int(s.read(0, 1)[0]) if s.n_tokens else None
    finally:
        cache.unpin(s)


def longest(cache, paths):
    """The longest shard, pinned; the caller unpins it."""
    best = None
    for p in paths:
        s = cache.pin(p)  # leak: a former best is lost when a longer one comes
        if best is None or s.n_tokens > best.n_tokens:
            best = s
        else:
            cache.unpin(s)
    return best


def shortest(cache, paths):
    """The shortest shard, pinned; the caller unpins it."""
    best = None
    for p in paths:
        s = cache.pin(p)  # clean: near miss, the loser of each comparison is unpinned and the winner returned
        if best is None:
            best = s
            continue
        keep, drop = (s, best) if s.n_tokens < best.n_tokens else (best, s)
        cache.unpin(drop)
        best = keep
    return best


def describe_extremes(cache, paths):
    lo = shortest(cache, paths)  # clean: None for no paths, else unpinned below
    hi = longest(cache, paths)  # leak: not unpinned when it is the same shard as lo, though each pin counts
    if lo is None:
        return {}
    out = {"min": lo.n_tokens, "max": hi.n_tokens}
    cache.unpin(lo)
    if hi is not lo:
        cache.unpin(hi)
    return out


class SequenceStream:
    """Endless stream of fixed-length sequences over shuffled shards."""

    def __init__(self, cache, paths, seq_len, seed):
        self.cache = cache
        self.paths = list(paths)
        self.seq_len = seq_len
        self.rng = random.Random(seed)
        self._cur = None
        self._pos = 0

    def _advance(self):
        if self._cur is not None:
            self.cache.unpin(self._cur)
            self._cur = None
        self._cur = self.cache.pin(self.rng.choice(self.paths))  # clean: near miss, the stream's current shard, unpinned by the next _advance() or close()
        self._pos = 0

    def __iter__(self):
        return self

    def __next__(self):
        while self._cur is None or self._pos + self.seq_len > self._cur.n_tokens:
            self._advance()
        out = self._cur.read(self._pos, self.seq_len)
        self._pos += self.seq_len
        return out

    def seek(self, path, pos):
        """Resume from a checkpointed position."""
        self.close()
        self._cur = self.cache.pin(path)  # clean: near miss, the former shard is unpinned by close() first and this one by _advance() or close()
        self._pos = pos

    def close(self):
        if self._cur is not None:
            self.cache.unpin(self._cur)
            self._cur = None


def windows(cache, path, length, stride):
    """Overlapping windows of one shard."""
    s = cache.pin(path)  # clean: near miss, unpinned in finally also when the generator is closed early
    try:
        for start in range(0, s.n_tokens - length + 1, stride):
            yield s.read(start, length)
    finally:
        cache.unpin(s)


def interleave(cache, a, b, length):
    """Alternates between two shards until the shorter one ends."""
    sa = cache.pin(a)  # leak: kept when shard b is too short
    sb = cache.pin(b)  # clean: unpinned on the early exit and after the loop
    if sb.n_tokens < length:
        cache.unpin(sb)
        return
    pos = 0
    out = []
    while pos + length <= min(sa.n_tokens, sb.n_tokens):
        out.append(sa.read(pos, length))
        out.append(sb.read(pos, length))
        pos += length
    cache.unpin(sb)
    cache.unpin(sa)
    yield from out
