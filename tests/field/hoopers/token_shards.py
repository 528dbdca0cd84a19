"""Training data: memory-mapped token shards, packed rows, prefetched batches."""
import json
import mmap
import os
import queue
import random
import struct
import sys
import threading
from collections import OrderedDict, deque

import numpy as np

MAGIC = 0x544F4B53
HEADER = struct.Struct("<IIQ")

class BadShard(Exception): pass
class NoRows(Exception): pass

class Shard:
    def __init__(self, path, mm, n_docs, n_tokens):
        self.path = path
        self.mm = mm
        self.bounds = np.frombuffer(mm, np.uint64, n_docs + 1, HEADER.size)
        self.tokens = np.frombuffer(mm, np.uint16, n_tokens, HEADER.size + 8 * (n_docs + 1))
        self.users = 0

    def doc(self, i):
        return self.tokens[int(self.bounds[i]):int(self.bounds[i + 1])]

    def __len__(self):
        return len(self.bounds) - 1

    def close(self):
        self.bounds = self.tokens = None
        self.mm.close()

def open_shard(path):
    fd = os.open(path, os.O_RDONLY)  # clean: the mapping outlives it and the finally closes it
    try:
        mm = mmap.mmap(fd, 0, prot=mmap.PROT_READ)  # leak: a wrong magic number raises BadShard with the mapping open
    finally:
        os.close(fd)
    magic, n_docs, n_tokens = HEADER.unpack_from(mm)
    if magic != MAGIC:
        raise BadShard(path)
    return Shard(path, mm, n_docs, n_tokens)

class ShardCache:
    """Open shards by path.  Unused ones stay around up to `spare`."""

    def __init__(self, spare=16):
        self._open = {}
        self._spare = OrderedDict()
        self._n = spare
        self._lock = threading.Lock()

    def use(self, path):
        with self._lock:
            shard = self._open.get(path)
            if shard is None:
                shard = self._spare.pop(path, None)  # clean: stored in _open below
            if shard is None:
                shard = open_shard(path)  # clean: stored in _open, closed from _spare
            self._open[path] = shard
            shard.users += 1
            return shard

    def done(self, shard):
        with self._lock:
            shard.users -= 1
            if shard.users:
                return
            del self._open[shard.path]
            self._spare[shard.path] = shard
            while len(self._spare) > self._n:
                self._spare.popitem(last=False)[1].close()  # clean: closed on the same line

    def close(self):
        with self._lock:
            for shard in self._spare.values():
                shard.close()
            self._spare.clear()

def iter_docs(cache, path, start=0):
    shard = cache.use(path)  # clean: finally
    try:
        for i in range(start, len(shard)):
            yield shard.doc(i)
    finally:
        cache.done(shard)

def count_tokens(cache, paths, min_docs=1):
    total = 0
    for path in paths:
        try:
            shard = cache.use(path)  # leak: a shard with too few documents is passed over without done
        except BadShard as exc:
            print(f"not a shard: {exc}", file=sys.stderr)
            continue
        if len(shard) < min_docs:
            continue
        total += int(shard.bounds[-1])
        cache.done(shard)
    return total

def read_resume_point(path, run_id):
    if not os.path.exists(path):
        return None
    fh = open(path)  # leak: a file of another run returns None without close
    head = json.loads(fh.readline())
    if head.get("run") != run_id:
        return None
    last = None
    for line in fh:
        last = json.loads(line)
    fh.close()
    return last

class RowPool:
    """Preallocated rows of a fixed length; everything downstream works in them."""

    def __init__(self, n, length):
        self.length = length
        self._rows = deque(np.zeros(length, np.int32) for _ in range(n))
        self._cv = threading.Condition()

    def take(self, timeout=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._rows, timeout):
                raise NoRows()
            return self._rows.popleft()  # clean: returned

    def give(self, row):
        with self._cv:
            self._rows.append(row)
            self._cv.notify()

class Packer:
    """Fills rows with documents end to end and emits each full row."""

    def __init__(self, pool, eos, drop_last=True):
        self.pool = pool
        self.eos = eos
        self.drop_last = drop_last
        self._row = None
        self._fill = 0

    def feed(self, doc):
        pos = 0
        while pos < len(doc):
            if self._row is None:
                self._row = self.pool.take()  # leak: finish() with drop_last forgets the row that is partly filled
                self._fill = 0
            n = min(len(doc) - pos, self.pool.length - self._fill)
            self._row[self._fill:self._fill + n] = doc[pos:pos + n]
            self._fill += n
            pos += n
            if self._fill == self.pool.length:
                full, self._row = self._row, None
                yield full

    def finish(self):
        if self._row is None:
            return None
        if self.drop_last:
            self._row = None
            return None
        self._row[self._fill:] = self.eos
        tail, self._row = self._row, None
        return tail

def padded(pool, docs, eos):
    """One row a document, for evaluation sets."""
    for doc in docs:
        row = pool.take()  # clean: near miss, both ways out of the body hand it on or give it back
        if len(doc) > pool.length:
            pool.give(row)
            continue
        row[:len(doc)] = doc
        row[len(doc):] = eos
        yield row

def shuffled(rows, size, rng):
    """Reservoir shuffle.  What goes in comes out, in another order."""
    buf = []
    for row in rows:
        if len(buf) < size:
            buf.append(row)
            continue
        i = rng.randrange(size)
        row, buf[i] = buf[i], row
        yield row
    rng.shuffle(buf)
    yield from buf

def packed_rows(cache, paths, pool, eos):
    packer = Packer(pool, eos)
    for path in paths:
        for doc in iter_docs(cache, path):
            yield from packer.feed(doc)
    tail = packer.finish()
    if tail is not None:
        yield tail

class Prefetcher:
    """Noise rows for the denoising objective, prepared in a thread."""

    def __init__(self, pool, batch, corrupt, depth=4):
        self.pool, self.batch, self.corrupt = pool, batch, corrupt
        self.q = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def start(self):
        self._thread.start()
        return self

    def _produce(self):
        rng = random.Random(0)
        while not self._stop.is_set():
            rows = []
            try:
                for _ in range(self.batch):
                    rows.append(self.pool.take(timeout=1.0))  # leak: stop() empties the queue and throws the batches in it away
            except NoRows:
                for row in rows:
                    self.pool.give(row)
                continue
            for row in rows:
                self.corrupt(row, rng)
            self.q.put(rows)

    def next(self):
        return self.q.get()  # clean: returned

    def recycle(self, rows):
        for row in rows:
            self.pool.give(row)

    def stop(self):
        self._stop.set()
        while self._thread.is_alive() or not self.q.empty():
            try:
                self.q.get(timeout=0.1)  # leak: the batch is dropped with its rows
            except queue.Empty:
                pass

def train(prefetcher, pool, model, steps):
    for _ in range(steps):
        rows = prefetcher.next()  # clean: recycled in the finally
        try:
            labels = pool.take()  # clean: inner finally
            try:
                labels[:] = model.targets(rows)
                model.step(np.stack(rows), labels)
            finally:
                pool.give(labels)
        finally:
            prefetcher.recycle(rows)
