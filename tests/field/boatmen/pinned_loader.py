"""Loads checkpoint shards into device memory through a ring of pinned buffers.

Reader threads fill buffers, one copy thread drains them onto the device.
"""

import json
import logging
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger("loader")

class ShardError(Exception):
    """The file's contents are not what the index says."""

class PinnedBuffer:
    def __init__(self, index, nbytes):
        self.index = index
        self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.used = 0
        self.label = ""

class PinnedRing:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self.count = count
        self._ready = queue.LifoQueue()
        for i in range(count):
            self._ready.put(PinnedBuffer(i, nbytes))

    def obtain(self, timeout=None):
        buf = self._ready.get(timeout=timeout)  # clean: returned to the caller
        buf.used = 0
        buf.label = ""
        return buf

    def recycle(self, buf):
        self._ready.put(buf)

    def resize(self, nbytes):
        """Replaces all idle buffers by buffers of another size."""
        n = 0
        while True:
            try:
                self._ready.get_nowait()  # clean: near miss, thrown away on purpose and replaced one by one below
            except queue.Empty:
                break
            n += 1
        for i in range(n):
            self._ready.put(PinnedBuffer(i, nbytes))
        self.nbytes = nbytes

class FileTable:
    """Open shard files, counted, since several readers work on one shard."""

    def __init__(self, root):
        self.root = root
        self._files = {}
        self._counts = {}
        self._lock = threading.Lock()

    def get(self, name):
        with self._lock:
            if name not in self._files:
                self._files[name] = os.open(os.path.join(self.root, name), os.O_RDONLY)  # clean: near miss, in the table and closed by the last put()
                self._counts[name] = 0
            self._counts[name] += 1
            return self._files[name]

    def put(self, name):
        with self._lock:
            self._counts[name] -= 1
            if self._counts[name] == 0:
                os.close(self._files.pop(name))
                del self._counts[name]

class Piece:
    def __init__(self, tensor, shard, offset, length, dest_offset):
        self.tensor = tensor
        self.shard = shard
        self.offset = offset
        self.length = length
        self.dest_offset = dest_offset

class Loader:
    def __init__(self, root, ring, device, readers=4):
        self.files = FileTable(root)
        self.ring = ring
        self.device = device
        self.readers = readers
        self.full = queue.Queue()
        self.targets = {}
        self.errors = []
        self.skipped = 0
        self.stop = threading.Event()

    def plan(self, index):
        for name, meta in index.items():
            self.targets[name] = torch.empty(meta["nbytes"], dtype=torch.uint8, device=self.device)
            done = 0
            while done < meta["nbytes"]:
                n = min(self.ring.nbytes, meta["nbytes"] - done)
                yield Piece(name, meta["shard"], meta["offset"] + done, n, done)
                done += n

    def read_piece(self, piece):
        buf = self.ring.obtain()  # leak: copier() does not recycle buffers whose target is gone
        fd = self.files.get(piece.shard)  # leak: the ShardError for a short read is raised ahead of put()
        got = os.preadv(fd, [memoryview(buf.data.numpy())[: piece.length]], piece.offset)
        if got != piece.length:
            self.ring.recycle(buf)
            raise ShardError(f"{piece.shard}: {got} of {piece.length} bytes")
        self.files.put(piece.shard)
        buf.used = got
        buf.label = piece.tensor
        self.full.put((piece, buf))

    def copier(self):
        stream = torch.cuda.Stream(self.device)
        pending = []
        while True:
            item = self.full.get()
            if item is None:
                break
            piece, buf = item
            target = self.targets.get(piece.tensor)
            if target is None:
                # the model decided not to load this one after all
                self.skipped += 1
                continue
            with torch.cuda.stream(stream):
                target[piece.dest_offset : piece.dest_offset + buf.used].copy_(buf.data[: buf.used], non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
            pending.append((event, buf))
            while pending and pending[0][0].query():
                self.ring.recycle(pending.pop(0)[1])
            if len(pending) >= self.ring.count - 1:
                event, buf = pending.pop(0)
                event.synchronize()
                self.ring.recycle(buf)
        for event, buf in pending:
            event.synchronize()
            self.ring.recycle(buf)

    def run(self, index):
        thread = threading.Thread(target=self.copier, name="h2d-copier")
        thread.start()
        with ThreadPoolExecutor(self.readers) as readers:
            for fut in [readers.submit(self.read_piece, p) for p in self.plan(index)]:
                try:
                    fut.result()
                except ShardError as exc:
                    logger.error("%s", exc)
                    self.errors.append(exc)
        self.full.put(None)
        thread.join()
        return not self.errors

    def forget(self, tensor):
        self.targets.pop(tensor, None)

class DirectLoader(Loader):
    """Small tensors: no copy thread, one buffer for all of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._own = None

    def _buffer(self):
        if self._own is None:
            self._own = self.ring.obtain()  # clean: near miss, kept by the loader and recycled in finish()
        return self._own

    def load_small(self, index):
        for piece in self.plan(index):
            buf = self._buffer()  # clean: the loader's own buffer, see finish()
            fd = self.files.get(piece.shard)  # clean: put() in the finally
            try:
                got = os.preadv(fd, [memoryview(buf.data.numpy())[: piece.length]], piece.offset)
                if got != piece.length:
                    raise ShardError(piece.tensor)
            finally:
                self.files.put(piece.shard)
            self.targets[piece.tensor][piece.dest_offset :][:got].copy_(buf.data[:got])

    def finish(self):
        if self._own is not None:
            self.ring.recycle(self._own)
            self._own = None

def load_small_tensors(root, ring, device, index):
    loader = DirectLoader(root, ring, device)
    try:
        loader.load_small(index)
    finally:
        loader.finish()
    return loader.targets

def checksum(ring, files, shard, expected):
    """Sums a whole shard; False when it does not match or the ring is busy."""
    fd = files.get(shard)  # leak: the return for a busy ring leaves the count one too high
    try:
        buf = ring.obtain(timeout=2.0)  # clean: recycled in the finally below
    except queue.Empty:
        return False
    total, offset = 0, 0
    try:
        while True:
            got = os.preadv(fd, [memoryview(buf.data.numpy())], offset)
            if got == 0:
                break
            total = (total + int(buf.data[:got].sum(dtype=torch.int64))) & 0xFFFFFFFF
            offset += got
    finally:
        ring.recycle(buf)
        files.put(shard)
    return total == expected

def parse_header(fd):
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size > 1 << 24:
        raise ShardError(f"header of {size} bytes")
    return json.loads(os.pread(fd, size, 8))

def read_header(files, shard):
    fd = files.get(shard)  # leak: the ShardError of parse_header is handled by a return before put()
    try:
        header = parse_header(fd)
    except ShardError as exc:
        logger.warning("%s: %s", shard, exc)
        return None
    files.put(shard)
    return header

def is_pinned(ring):
    buf = ring.obtain()  # leak: a buffer that is not page-locked is not recycled
    if not buf.data.is_pinned():
        return False
    ring.recycle(buf)
    return True

def bench(ring, rounds=16):
    a = ring.obtain()  # clean: swapped with b and recycled by the loop at the end
    b = ring.obtain(timeout=None)  # clean: swapped and recycled likewise
    for _ in range(rounds):
        b.data.copy_(a.data)
        a, b = b, a
    for buf in (a, b):
        ring.recycle(buf)
