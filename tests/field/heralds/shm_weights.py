"""Weights and scratch regions shared by the API workers of one host.

Module state on purpose: there is one arena per process tree.
"""
import json
import logging
import threading
from collections import namedtuple
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory

import numpy as np

log = logging.getLogger("shm")

MAGIC = b"SHW2"
ALIGN = 256
HEAD = 4096

Region = namedtuple("Region", "seg off size")


class BadSegment(Exception):
    pass


class ArenaFull(Exception):
    pass


_lock = threading.RLock()
_segs = {}     # name -> SharedMemory
_refs = {}     # name -> number of users in this process
_holes = {}    # name -> sorted list of (off, size)
_owned = set() # names created here
_table = {}    # tensor name -> (Region, shape, dtype)
_quant = {}    # tensor name -> (values Region, scales Region, shape)


def _up(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


def create_segment(name, size):
    with _lock:
        if name in _segs:
            raise BadSegment(f"{name} exists")
        seg = SharedMemory(name=name, create=True, size=size)  # clean: kept in _segs until the last close_segment, which closes and unlinks it
        seg.buf[:4] = MAGIC
        _segs[name], _refs[name] = seg, 1
        _owned.add(name)
        _holes[name] = [(HEAD, size - HEAD)]
    return name


def open_segment(name):
    """Map a segment that another process has created; counts users."""
    with _lock:
        seg = _segs.get(name)
        if seg is None:
            seg = SharedMemory(name=name)  # leak: a foreign segment raises BadSegment and stays mapped
            if bytes(seg.buf[:4]) != MAGIC:
                raise BadSegment(f"{name}: no {MAGIC!r}")
            _segs[name], _refs[name] = seg, 0
        _refs[name] += 1
        return seg


def close_segment(name):
    with _lock:
        _refs[name] -= 1
        if _refs[name] == 0:
            seg = _segs.pop(name)
            seg.close()
            if name in _owned:
                _owned.discard(name)
                seg.unlink()
            del _refs[name]


def grab(name, nbytes):
    want = _up(nbytes)
    with _lock:
        holes = _holes[name]
        for i, (_, size) in enumerate(holes):
            if size >= want:
                off, size = holes.pop(i)  # clean: near miss, the rest goes back in and the front is the caller's
                if size > want:
                    holes.insert(i, (off + want, size - want))
                return Region(name, off, want)
    raise ArenaFull(f"{name}: {nbytes} bytes")


def grab_largest(name):
    """All of the largest hole, capped at 64 MiB; for the log shipper."""
    with _lock:
        holes = _holes[name]
        if not holes:
            return None
        i = max(range(len(holes)), key=lambda k: holes[k][1])
        off, size = holes.pop(i)  # leak: what lies behind the cap is neither in the region nor put back into the holes
        return Region(name, off, min(size, 64 << 20))


def drop(region):
    with _lock:
        holes = _holes[region.seg]
        holes.append((region.off, region.size))
        holes.sort()
        merged = [holes[0]]
        for off, size in holes[1:]:
            last_off, last_size = merged[-1]
            if last_off + last_size == off:
                merged[-1] = (last_off, last_size + size)
            else:
                merged.append((off, size))
        holes[:] = merged


@contextmanager
def scratch(name, nbytes):
    region = grab(name, nbytes)  # clean: the finally
    try:
        yield _segs[name].buf[region.off:region.off + region.size]
    finally:
        drop(region)


def publish(seg, state):
    """Copy a state dict into the segment; callable again for new weights."""
    for key, arr in state.items():
        arr = np.ascontiguousarray(arr)
        region = grab(seg, arr.nbytes)  # leak: publishing a key again overwrites the entry that held the old region
        dst = np.ndarray(arr.shape, arr.dtype, _segs[seg].buf, region.off)
        dst[...] = arr
        _table[key] = (region, arr.shape, arr.dtype.str)
    _write_index(seg)


def publish_quantised(seg, key, arr, bits):
    """Values and scales in two regions under one key."""
    retire_quantised(key)
    values = grab(seg, arr.size * bits // 8)  # leak: ArenaFull for the scales leaves the values in no table
    scales = grab(seg, arr.shape[0] * 4)  # clean: recorded in the table
    top = np.abs(arr).max(axis=1) / (2 ** (bits - 1) - 1)
    np.ndarray((arr.shape[0],), np.float32, _segs[seg].buf, scales.off)[...] = top
    q = np.clip(np.rint(arr / top[:, None]), -128, 127).astype(np.int8)
    np.ndarray((values.size,), np.int8, _segs[seg].buf, values.off)[: q.size] = q.ravel()
    _quant[key] = (values, scales, arr.shape)
    _write_index(seg)


def retire_quantised(key):
    for region in _quant.pop(key, ())[:2]:
        drop(region)


def retire(key):
    entry = _table.pop(key, None)
    if entry is not None:
        drop(entry[0])


def _write_index(seg):
    index = {k: (r.off, shape, dtype) for k, (r, shape, dtype) in _table.items() if r.seg == seg}
    for k, (values, scales, shape) in _quant.items():
        if values.seg == seg:
            index[k + "#q"] = (values.off, shape, "|i1")
            index[k + "#scale"] = (scales.off, shape[:1], "<f4")
    raw = json.dumps(index).encode()
    _segs[seg].buf[8:8 + len(raw)] = raw
    _segs[seg].buf[4:8] = len(raw).to_bytes(4, "little")


def read_index(name):
    seg = open_segment(name)  # clean: the finally
    try:
        n = int.from_bytes(seg.buf[4:8], "little")
        return json.loads(bytes(seg.buf[8:8 + n]))
    finally:
        close_segment(name)


def fetch(name, key):
    """A private copy of one tensor, None if it is not published."""
    index = read_index(name)
    seg = open_segment(name)  # leak: an unknown key returns with the use count raised
    meta = index.get(key)
    if meta is None:
        log.info("no %s in %s", key, name)
        return None
    off, shape, dtype = meta
    out = np.ndarray(shape, np.dtype(dtype), seg.buf, off).copy()
    close_segment(name)
    return out


class View:
    """Zero copy view, keeps the segment open until close()."""

    def __init__(self, name, key):
        seg = open_segment(name)  # clean: near miss, closed in the error path, otherwise by View.close
        try:
            off, shape, dtype = read_index(name)[key]
        except KeyError:
            close_segment(name)
            raise
        self.name = name
        self.array = np.ndarray(shape, np.dtype(dtype), seg.buf, off)

    def close(self):
        if self.array is not None:
            self.array = None
            close_segment(self.name)


def serve(conn, worker, seg):
    """Parent side of one worker's pipe."""
    mine = []
    try:
        while True:
            op, arg = conn.recv()
            if op == "lend":
                try:
                    region = grab(seg, arg)  # clean: near miss, in the list of the worker, which the finally drops
                except ArenaFull as exc:
                    conn.send(("full", str(exc)))
                    continue
                mine.append(region)
                conn.send(("ok", region))
            elif op == "back":
                if arg in mine:
                    mine.remove(arg)
                    drop(arg)
            elif op == "quit":
                return
    except EOFError:
        log.warning("worker %s went away", worker)
    finally:
        for region in mine:
            drop(region)


def ship_logs(seg, lines, send):
    region = grab_largest(seg)  # clean: None or dropped by the finally
    if region is None:
        return 0
    try:
        raw = "\n".join(lines).encode()[: region.size]
        _segs[seg].buf[region.off:region.off + len(raw)] = raw
        send(region, len(raw))
        return len(raw)
    finally:
        drop(region)


def checksum(seg, arr):
    with scratch(seg, arr.nbytes) as buf:  # clean: with block
        buf[: arr.nbytes] = arr.tobytes()
        return sum(buf[: arr.nbytes]) & 0xFFFFFFFF
