"""Batches through shared memory.

One process-wide ring of fixed-size slots in a SharedMemory segment.  Workers are
forked after init(), write their collated batch into a slot and send only the
slot number and a layout over a pipe.  Everything here is module state because
the forked workers need it under the same names.
"""
import collections
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import struct
import sys
import time
from multiprocessing import shared_memory

import numpy as np

SLOT_BYTES = int(os.environ.get("LOADER_SLOT_BYTES", 8 << 20))
HEADER = struct.Struct("<IIQ")

_segment = None
_nslots = 0
_free_q = None          # slot numbers, shared by all the processes
_side = collections.deque()   # slots kept by this process for urgent batches
_stats = {"taken": 0, "given": 0, "starved": 0, "oversize": 0}


class Oversize(ValueError):
    pass


def init(nslots, reserve=1):
    global _segment, _nslots, _free_q
    if _segment is not None:
        raise RuntimeError("loader was initialised before")
    _segment = shared_memory.SharedMemory(create=True, size=nslots * SLOT_BYTES)  # clean: closed and unlinked in shutdown()
    _nslots = nslots
    _free_q = mp.Queue()
    for i in range(nslots - reserve):
        _free_q.put(i)
    _side.extend(range(nslots - reserve, nslots))


def shutdown():
    global _segment
    if _segment is None:
        return
    _side.clear()
    _segment.close()
    _segment.unlink()
    _segment = None


def take_slot(timeout=None):
    """Block for a slot number; None on timeout."""
    try:
        i = _free_q.get(timeout=timeout)  # clean: handed to the caller
    except Exception:
        _stats["starved"] += 1
        return None
    _stats["taken"] += 1
    return i


def take_urgent():
    if _side:
        _stats["taken"] += 1
        return _side.popleft()  # clean: handed to the caller
    return take_slot(timeout=0.05)  # clean: returned to the caller as it is


def put_slot(i):
    _stats["given"] += 1
    _free_q.put(i)


def top_up(keep):
    """Pull slots back into the urgent list."""
    while len(_side) < keep:
        i = take_slot(timeout=0.01)  # leak: a slot too near to the end of the segment is skipped and lost
        if i is None:
            return False
        if (i + 1) * SLOT_BYTES > _segment.size - HEADER.size:
            continue
        _side.append(i)
    return True


def slot_view(i):
    return memoryview(_segment.buf)[i * SLOT_BYTES:(i + 1) * SLOT_BYTES]


def pack(i, arrays):
    """Write the arrays one after another; returns their layout."""
    view = slot_view(i)
    off = HEADER.size
    layout = []
    for name, a in arrays.items():
        a = np.ascontiguousarray(a)
        if off + a.nbytes > SLOT_BYTES:
            _stats["oversize"] += 1
            raise Oversize(f"{name}: {a.nbytes} bytes at {off}")
        view[off:off + a.nbytes] = a.tobytes()
        layout.append((name, a.dtype.str, a.shape, off))
        off += (a.nbytes + 63) & ~63
    view[:HEADER.size] = HEADER.pack(0xB47C4, len(layout), off)
    return layout


def unpack(i, layout, copy=True):
    view = slot_view(i)
    magic, count, _ = HEADER.unpack(view[:HEADER.size])
    if magic != 0xB47C4 or count != len(layout):
        raise RuntimeError(f"slot {i} holds no batch")
    out = {}
    for name, dt, shape, off in layout:
        n = int(np.prod(shape)) * np.dtype(dt).itemsize
        a = np.frombuffer(view[off:off + n], dtype=dt).reshape(shape)
        out[name] = a.copy() if copy else a
    return out


# ---------------------------------------------------------------- worker side


def worker_main(conn, dataset, indices, collate):
    """Send (slot, layout) tuples; a big batch is sent in the pipe itself."""
    for chunk in indices:
        samples = [dataset[k] for k in chunk]
        arrays = collate(samples)
        i = take_slot()  # leak: the Oversize handler sends the arrays inline and forgets the slot
        if i is None:
            break
        try:
            layout = pack(i, arrays)
        except Oversize as exc:
            print("loader:", exc, file=sys.stderr)
            conn.send(("inline", pickle.dumps(arrays)))
            continue
        conn.send(("slot", (i, layout)))
    conn.send(("end", None))


def worker_main_split(conn, dataset, indices, collate):
    """Like worker_main, but halves a batch that does not fit."""
    todo = collections.deque(list(c) for c in indices)
    while todo:
        chunk = todo.popleft()
        i = take_slot()  # clean: near miss, the Oversize path gives it back before it splits
        if i is None:
            break
        try:
            layout = pack(i, collate([dataset[k] for k in chunk]))
        except Oversize:
            put_slot(i)
            if len(chunk) > 1:
                mid = len(chunk) // 2
                todo.appendleft(chunk[mid:])
                todo.appendleft(chunk[:mid])
            continue
        conn.send(("slot", (i, layout)))
    conn.send(("end", None))


def send_probe(conn):
    i = take_urgent()  # leak: nothing is sent into a closed pipe and the slot is not put back
    if i is None:
        return False
    layout = pack(i, {"probe": np.arange(4)})
    if conn.closed:
        return False
    conn.send(("slot", (i, layout)))
    return True


# ---------------------------------------------------------------- trainer side


def receive(conns):
    """Yield batches (copied) until every worker sent its end."""
    live = list(conns)
    while live:
        for conn in mp.connection.wait(live, timeout=5.0):
            kind, body = conn.recv()
            if kind == "end":
                live.remove(conn)
            elif kind == "inline":
                yield pickle.loads(body)
            else:
                i, layout = body
                try:
                    batch = unpack(i, layout)
                finally:
                    put_slot(i)
                yield batch


def concat_batches(batches):
    """Join host batches in a scratch slot, return plain arrays."""
    i = take_urgent()  # clean: given back in finally, without a slot numpy does it
    if i is None:
        return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    try:
        layout = pack(i, {k: np.concatenate([b[k] for b in batches]) for k in batches[0]})
        return unpack(i, layout)
    except Oversize:
        return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    finally:
        put_slot(i)


def double_buffer(source):
    """Keep one batch ahead in a slot; yields views that live for one step."""
    prev = None
    for arrays in source:
        cur = take_slot(timeout=1.0)  # leak: the slot of the last batch is never put after the loop
        if cur is None:
            yield arrays
            continue
        try:
            layout = pack(cur, arrays)
        except Oversize:
            put_slot(cur)
            yield arrays
            continue
        if prev is not None:
            put_slot(prev)
        prev = cur
        yield unpack(cur, layout, copy=False)


def warm_up():
    """Touch every free page once."""
    held = []
    while True:
        i = take_slot(timeout=0.01)  # clean: near miss, all of held is put back below
        if i is None:
            break
        slot_view(i)[::4096] = bytes(len(range(0, SLOT_BYTES, 4096)))
        held.append(i)
    for i in held:
        put_slot(i)
    return len(held)


def bench(arrays, rounds=100):
    t0 = time.perf_counter()
    i = take_slot(timeout=1.0)  # leak: the assertion-like check in unpack() raises RuntimeError, caught below without put_slot
    if i is None:
        return None
    try:
        for _ in range(rounds):
            unpack(i, pack(i, arrays))
    except (Oversize, RuntimeError) as exc:
        print("bench:", exc, file=sys.stderr)
        return None
    put_slot(i)
    return (time.perf_counter() - t0) / rounds
