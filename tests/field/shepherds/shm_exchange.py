"""Exchange of large arrays between tokenizer processes and the engine through shared memory segments."""
import atexit
import contextlib
import dataclasses
import logging
import os
import queue
import secrets
import struct
from multiprocessing import shared_memory

import numpy as np

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<IIQ")
MAGIC = 0x5EC5

class CorruptSegment(Exception):
    """The header is not ours."""

class TooBig(Exception):
    pass

@dataclasses.dataclass
class Segment:
    """A mapped segment. The creator unlinks it, a reader only closes its mapping."""
    shm: shared_memory.SharedMemory
    creator: bool
    meta: dict = dataclasses.field(default_factory=dict)

    @property
    def name(self):
        return self.shm.name

    def release(self):
        self.shm.close()
        if self.creator:
            self.shm.unlink()

def create(nbytes, limit=1 << 30):
    if nbytes > limit:
        raise TooBig(f"{nbytes} > {limit}")
    name = f"eng_{os.getpid()}_{secrets.token_hex(4)}"
    shm = shared_memory.SharedMemory(name=name, create=True, size=nbytes + HEADER.size)  # clean: goes out in the Segment
    return Segment(shm, True)

def attach(name):
    """Map a segment that another process made. Raises CorruptSegment."""
    shm = shared_memory.SharedMemory(name=name)  # leak: a wrong magic raises with the mapping open
    magic, dtype_code, n = HEADER.unpack_from(shm.buf, 0)
    if magic != MAGIC:
        raise CorruptSegment(name)
    return Segment(shm, False, {"dtype": dtype_code, "n": n})

def attach_or_none(name):
    try:
        return attach(name)  # clean: returned to the caller
    except FileNotFoundError:
        return None

def write_array(seg, arr):
    HEADER.pack_into(seg.shm.buf, 0, MAGIC, arr.dtype.num, arr.size)
    dst = np.ndarray(arr.shape, arr.dtype, buffer=seg.shm.buf, offset=HEADER.size)
    dst[...] = arr
    del dst

def read_array(seg):
    dtype = np.sctypeDict[seg.meta["dtype"]]
    view = np.ndarray((seg.meta["n"],), dtype, buffer=seg.shm.buf, offset=HEADER.size)
    out = view.copy()
    del view
    return out

class SegmentCache:
    """Reuses segments by size class, so that not every batch costs a create and an unlink."""

    def __init__(self, keep=8):
        self.keep = keep
        self._by_class = {}
        self.made = 0

    @staticmethod
    def size_class(nbytes):
        return 1 << max(12, (nbytes - 1).bit_length())

    def get(self, nbytes):
        cls = self.size_class(nbytes)
        bucket = self._by_class.setdefault(cls, [])
        if bucket:
            return bucket.pop()  # clean: returned to the caller
        self.made += 1
        return create(cls)  # clean: returned to the caller

    def put(self, seg):
        bucket = self._by_class.setdefault(self.size_class(seg.shm.size - HEADER.size), [])
        if len(bucket) >= self.keep:
            seg.release()
            return
        bucket.append(seg)

    def trim(self, budget):
        """Release the smallest segments until at most `budget` bytes are cached."""
        total = sum(cls * len(b) for cls, b in self._by_class.items())
        for cls in sorted(self._by_class):
            bucket = self._by_class[cls]
            while bucket and total > budget:
                bucket.pop().release()  # clean: released at once
                total -= cls

    def close(self):
        for bucket in self._by_class.values():
            for seg in bucket:
                seg.release()
        self._by_class = {}

class Sender:
    """Writes arrays and announces them. A segment is ours again when the peer has acknowledged its name."""

    def __init__(self, channel, cache):
        self.channel = channel
        self.cache = cache
        self.unacked = {}
        self.scratch = None
        atexit.register(self.close)

    def send(self, arr):
        seg = self.cache.get(arr.nbytes)  # clean: near miss, the table of unacknowledged ones owns it until on_ack() or close()
        write_array(seg, arr)
        self.unacked[seg.name] = seg
        self.channel.send(("array", seg.name, arr.shape))

    def on_ack(self, name):
        seg = self.unacked.pop(name, None)
        if seg is None:
            logger.warning("ack for %s, which is not out", name)
            return
        self.cache.put(seg)

    def send_many(self, arrays):
        """One message for several arrays, refused as a whole when the channel is congested."""
        segs = []
        for arr in arrays:
            seg = self.cache.get(arr.nbytes)  # leak: a congested channel returns False with all of them filled
            write_array(seg, arr)
            segs.append(seg)
        if self.channel.congested():
            logger.info("channel congested, %d arrays not sent", len(segs))
            return False
        for seg in segs:
            self.unacked[seg.name] = seg
        self.channel.send(("arrays", [s.name for s in segs], [a.shape for a in arrays]))
        return True

    def scratchpad(self, nbytes):
        """A segment that grows as needed, for headers and small tensors."""
        if self.scratch is not None and self.scratch.shm.size >= nbytes:
            return self.scratch
        self.scratch = self.cache.get(nbytes)  # leak: the smaller one that it replaces is not put back, and close() forgets the last
        return self.scratch

    def close(self):
        for seg in self.unacked.values():
            seg.release()
        self.unacked.clear()

class Receiver:
    def __init__(self, channel):
        self.channel = channel
        self.mapped = {}
        self.bad = 0

    def take(self, name, shape):
        seg = attach(name)  # clean: closed in finally
        try:
            arr = read_array(seg).reshape(shape)
        finally:
            seg.release()
        self.channel.send(("ack", name))
        return arr

    def take_view(self, name, shape):
        """Zero copy: the mapping stays until drop_view()."""
        if name in self.mapped:
            return self.mapped[name]
        try:
            seg = attach(name)  # clean: the handler runs where attach() gave us nothing
        except CorruptSegment:
            self.bad += 1
            return None
        self.mapped[name] = seg
        return seg

    def drop_view(self, name):
        seg = self.mapped.pop(name, None)
        if seg is not None:
            seg.release()
            self.channel.send(("ack", name))

    def peek_all(self, names):
        """Element counts of segments, in order; names that are gone count as 0."""
        counts = []
        for name in names:
            seg = attach_or_none(name)  # leak: an empty segment is counted and left mapped
            if seg is None:
                counts.append(0)
                continue
            n = seg.meta["n"]
            counts.append(n)
            if n == 0:
                continue
            seg.release()
        return counts

    def close(self):
        for name in list(self.mapped):
            self.drop_view(name)

@contextlib.contextmanager
def temporary(nbytes):
    seg = create(nbytes)  # clean: finally releases
    try:
        yield seg
    finally:
        seg.release()

def self_test(nbytes=4096):
    with temporary(nbytes) as seg:  # clean: with block
        write_array(seg, np.arange(16, dtype=np.int32))
        other = attach(seg.name)  # clean: the assert comes after the release
        same = read_array(other).tolist() == list(range(16))
        other.release()
        assert same
    return True

def pump(inbox, cache, encode, out):
    """Body of a tokenizer process: texts in, names of segments out. The engine sends the names back as 'done'."""
    lent = {}
    while True:
        kind, payload = inbox.get()
        if kind == "stop":
            break
        if kind == "done":
            cache.put(lent.pop(payload))
            continue
        ids = np.asarray(encode(payload), dtype=np.int32)
        seg = cache.get(ids.nbytes)  # leak: what is still lent at "stop" is neither put back nor released, and a full queue drops it at once
        write_array(seg, ids)
        try:
            out.put_nowait((seg.name, ids.size))
        except queue.Full:
            logger.warning("engine is slow, %d ids dropped", ids.size)
            continue
        lent[seg.name] = seg
    cache.close()
