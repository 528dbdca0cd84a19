"""Tensor exchange between the scheduler and its workers over shared memory.

Segments are rounded to power-of-two buckets and reused.  The sender keeps a
segment in _inflight until the receiver acknowledges it by name.
"""
import contextlib
import itertools
import logging
import os
import queue
import threading
import zlib
from collections import namedtuple
from multiprocessing import shared_memory

import numpy as np

_log = logging.getLogger("shm")

LIMIT = int(os.environ.get("SHM_LIMIT_MB", "2048")) << 20
KNOWN_DTYPES = {"float16", "float32", "int32", "int64", "uint8"}

Desc = namedtuple("Desc", "shm name dtype shape crc")

_lock = threading.RLock()
_free = {}          # bucket size -> list of segments
_inflight = {}      # segment name -> segment, waits for an ack
_refs = {}          # segment name -> acks still to come (broadcasts only)
_rings = {}         # ring name -> list of segments
_total = 0
_serial = itertools.count()

class ShmBudget(RuntimeError):
    pass

class CorruptFrame(ValueError):
    pass

class Segment:
    def __init__(self, shm, bucket):
        self.shm = shm
        self.bucket = bucket
        self.owner = ""

    @property
    def name(self):
        return self.shm.name

    def array(self, shape, dtype):
        return np.ndarray(shape, dtype=dtype, buffer=self.shm.buf)

    def describe(self, tensor_name, arr):
        return Desc(self.name, tensor_name, str(arr.dtype), arr.shape, zlib.crc32(arr.tobytes()))

def _bucket(nbytes):
    return max(4096, 1 << (max(nbytes, 1) - 1).bit_length())

def _create(bucket):
    name = f"lm_{os.getpid()}_{next(_serial)}"
    return shared_memory.SharedMemory(name=name, create=True, size=bucket)  # clean: returned

def grab(nbytes, owner):
    global _total
    bucket = _bucket(nbytes)
    with _lock:
        stack = _free.setdefault(bucket, [])
        if stack:
            seg = stack.pop()  # clean: returned
        elif _total + bucket > LIMIT:
            raise ShmBudget(f"{owner}: {bucket} more bytes would pass the limit of {LIMIT}")
        else:
            seg = Segment(_create(bucket), bucket)  # clean: returned inside the Segment
            _total += bucket
        seg.owner = owner
        return seg

def put_back(seg):
    seg.owner = ""
    with _lock:
        _free.setdefault(seg.bucket, []).append(seg)

def trim(keep):
    """Unlink unused segments over `keep` a bucket."""
    global _total
    with _lock:
        for bucket, stack in _free.items():
            while len(stack) > keep:
                seg = stack.pop()  # clean: closed and unlinked instead of put back
                seg.shm.close()
                seg.shm.unlink()
                _total -= bucket

@contextlib.contextmanager
def scratch(nbytes, owner="scratch"):
    seg = grab(nbytes, owner)  # clean: finally
    try:
        yield seg
    finally:
        put_back(seg)

def send_tensors(q, tensors):
    descs = []
    for name, arr in tensors.items():
        seg = grab(arr.nbytes, "tx")  # leak: an unknown dtype is skipped with the segment in hand
        if str(arr.dtype) not in KNOWN_DTYPES:
            _log.warning("%s: dtype %s cannot be sent", name, arr.dtype)
            continue
        np.copyto(seg.array(arr.shape, arr.dtype), arr)
        descs.append(seg.describe(name, arr))
        with _lock:
            _inflight[seg.name] = seg
    q.put(descs)
    return len(descs)

def send_one(q, name, arr, timeout=1.0):
    seg = grab(arr.nbytes, "tx1")  # clean: near miss, put back when the queue is full, otherwise by the ack
    np.copyto(seg.array(arr.shape, arr.dtype), arr)
    with _lock:
        _inflight[seg.name] = seg
    try:
        q.put([seg.describe(name, arr)], timeout=timeout)
    except queue.Full:
        with _lock:
            del _inflight[seg.name]
        put_back(seg)
        return False
    return True

def send_stubborn(q, name, arr, tries=5):
    seg = None
    for i in range(tries):
        seg = grab(arr.nbytes, "txr")  # leak: after queue.Full the next try takes a new segment over the old one
        np.copyto(seg.array(arr.shape, arr.dtype), arr)
        try:
            q.put([seg.describe(name, arr)], timeout=0.2 * (i + 1))
        except queue.Full:
            _log.debug("queue full, try %d of %d", i + 1, tries)
            continue
        with _lock:
            _inflight[seg.name] = seg
        return True
    return False

def broadcast(queues, name, arr):
    live = [q for q in queues if not getattr(q, "closed", False)]
    seg = grab(arr.nbytes, "bcast")  # leak: without a live queue no ack ever comes for the segment
    np.copyto(seg.array(arr.shape, arr.dtype), arr)
    with _lock:
        _inflight[seg.name] = seg
        _refs[seg.name] = len(live)
    desc = seg.describe(name, arr)
    for q in live:
        q.put([desc])
    return len(live)

def on_ack(names):
    done = []
    with _lock:
        for name in names:
            left = _refs.get(name, 1) - 1
            if left > 0:
                _refs[name] = left
                continue
            _refs.pop(name, None)
            seg = _inflight.pop(name, None)
            if seg is not None:
                done.append(seg)
    for seg in done:
        put_back(seg)

def export_state(q, state, manifest):
    """One segment for a whole state dict, laid out as the manifest says."""
    total = sum(nbytes for _, _, nbytes in manifest)
    seg = grab(total, "export")  # leak: a stale manifest returns None and the segment stays out
    raw = seg.array((seg.bucket,), "uint8")
    for key, offset, nbytes in manifest:
        arr = state.get(key)
        if arr is None or arr.nbytes != nbytes:
            _log.error("manifest is stale at %s", key)
            return None
        raw[offset:offset + nbytes] = arr.reshape(-1).view("uint8")
    with _lock:
        _inflight[seg.name] = seg
    q.put([seg.describe("__state__", raw)])
    return seg.name

def open_ring(name, depth, nbytes):
    if name in _rings:
        close_ring(name)
    segs = []
    try:
        for _ in range(depth):
            segs.append(grab(nbytes, f"ring:{name}"))  # clean: near miss, a failure puts the first ones back, close_ring the whole
    except ShmBudget:
        for seg in segs:
            put_back(seg)
        raise
    _rings[name] = segs
    return [s.name for s in segs]

def grow_ring_slot(name, i, nbytes):
    ring = _rings[name]
    if ring[i].bucket >= nbytes:
        return ring[i].name
    fresh = grab(nbytes, f"ring:{name}")  # clean: near miss, swapped in for the old segment, which is put back
    old, ring[i] = ring[i], fresh
    put_back(old)
    return fresh.name

def close_ring(name):
    for seg in _rings.pop(name, ()):
        put_back(seg)

class Mapped:
    def __init__(self, desc):
        self.desc = desc
        self._shm = shared_memory.SharedMemory(name=desc.shm)  # clean: close() unmaps it
        self.arr = np.ndarray(desc.shape, dtype=desc.dtype, buffer=self._shm.buf)

    def ok(self):
        return zlib.crc32(self.arr.tobytes()) == self.desc.crc

    def close(self):
        self.arr = None
        self._shm.close()

def recv_copy(desc):
    shm = shared_memory.SharedMemory(name=desc.shm)  # clean: finally
    try:
        return np.ndarray(desc.shape, dtype=desc.dtype, buffer=shm.buf).copy()
    finally:
        shm.close()

def recv_batch(descs):
    mapped = [Mapped(d) for d in descs]  # leak: CorruptFrame is raised with all mappings open
    bad = [m.desc.name for m in mapped if not m.ok()]
    if bad:
        raise CorruptFrame(", ".join(bad))
    return mapped

def serve(q, ack_q, step):
    while True:
        descs = q.get()
        if descs is None:
            return
        try:
            mapped = recv_batch(descs)  # clean: closed in the finally
        except CorruptFrame as exc:
            _log.error("frame dropped: %s", exc)
            ack_q.put([d.shm for d in descs])
            continue
        try:
            step({m.desc.name: m.arr for m in mapped})
        finally:
            for m in mapped:
                m.close()
            ack_q.put([d.shm for d in descs])
