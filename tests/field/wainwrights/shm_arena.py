"""Shared-memory arena between data-loader workers and the trainer.

One segment per host, attached by name.  It is cut into chunks of CHUNK bytes; arrays take a run of chunks.  The state
is module level, because the worker entry point that our launcher uses takes a function and nothing else.
"""

import atexit
import os
import pickle
import signal
import traceback
from multiprocessing import Lock, Queue, shared_memory

import numpy as np

CHUNK = 64 * 1024

_segment = None
_map = None          # uint8 per chunk in the segment's head: 0 free, 1 used
_base = 0
_lock = Lock()
_attached = {}       # name -> SharedMemory of other hosts' arenas, for tests
_staged = {}         # key -> (first, count): arrays a worker has filled and not sent
_borrowed = {}       # first -> [count, readers]
_stats = {"alloc": 0, "free": 0, "full": 0}


class ArenaError(RuntimeError):
    pass


def create(name, nbytes):
    global _segment, _map, _base
    if _segment is not None:
        raise ArenaError("arena exists already")
    chunks = nbytes // CHUNK
    _base = -(-chunks // CHUNK) * CHUNK
    _segment = shared_memory.SharedMemory(name, create=True, size=_base + chunks * CHUNK)  # clean: destroy() runs at exit
    _map = np.ndarray(chunks, np.uint8, _segment.buf)
    _map[:] = 0
    atexit.register(destroy)


def destroy():
    global _segment, _map
    if _segment is None:
        return
    _map = None
    _segment.close()
    _segment.unlink()
    _segment = None


def attach(name, expect_chunks=None):
    """A second arena, read only.  Attached segments are cached."""
    if name in _attached:
        return _attached[name]
    seg = shared_memory.SharedMemory(name)  # leak: a size that differs raises before the segment gets into _attached
    if expect_chunks is not None and seg.size < expect_chunks * CHUNK:
        raise ArenaError("%s has %d bytes, expected %d chunks" % (name, seg.size, expect_chunks))
    _attached[name] = seg
    return seg


def detach_all():
    for name in list(_attached):
        _attached.pop(name).close()


def _find(count):
    run = 0
    for i, used in enumerate(_map):
        run = 0 if used else run + 1
        if run == count:
            return i - count + 1
    return -1


def chunks_for(nbytes):
    return max(1, -(-nbytes // CHUNK))


def alloc(nbytes):
    """First chunk of a run for nbytes, or -1."""
    count = chunks_for(nbytes)
    with _lock:
        first = _find(count)
        if first < 0:
            _stats["full"] += 1
            return -1
        _map[first:first + count] = 1
        _stats["alloc"] += 1
    return first


def release(first, nbytes):
    count = chunks_for(nbytes)
    with _lock:
        _map[first:first + count] = 0
        _stats["free"] += 1


def view(first, shape, dtype):
    return np.ndarray(shape, dtype, _segment.buf, _base + first * CHUNK)


def alloc_or_raise(nbytes):
    first = alloc(nbytes)  # clean: returned, -1 is turned into an error
    if first < 0:
        raise ArenaError("no run of %d chunks" % chunks_for(nbytes))
    return first


def stage(key, array):
    first = alloc_or_raise(array.nbytes)  # leak: staging a key again replaces the entry and the old run stays marked
    view(first, array.shape, array.dtype)[...] = array
    _staged[key] = (first, array.nbytes, array.shape, array.dtype.str)
    return key


def send_staged(q, keys):
    """Hand the arrays over; the receiver releases them (see receive)."""
    for key in keys:
        q.put((key,) + _staged.pop(key))


def unstage(key):
    first, nbytes, _, _ = _staged.pop(key)
    release(first, nbytes)


def send_now(q, key, array):
    first = alloc(array.nbytes)  # clean: near miss, the message carries it and the receiver releases it
    if first < 0:
        q.put((key, None, pickle.dumps(array)))
        return False
    view(first, array.shape, array.dtype)[...] = array
    q.put((key, first, array.nbytes, array.shape, array.dtype.str))
    return True


def send_batch(q, arrays, limit):
    """All arrays of a sample, or none when the sample is too big."""
    runs = []
    total = 0
    for name, a in arrays.items():
        first = alloc(a.nbytes)  # leak: a sample over the limit returns 0 while the runs so far are only known here
        if first < 0:
            for f, n, _, _, _ in runs:
                release(f, n)
            return -1
        runs.append((first, a.nbytes, a.shape, a.dtype.str, name))
        total += a.nbytes
        if total > limit:
            return 0
        view(first, a.shape, a.dtype)[...] = a
    for f, n, shape, dt, name in runs:
        q.put((name, f, n, shape, dt))
    return len(runs)


def convert(sample, out_dtype):
    """uint16 token ids to out_dtype by way of a temporary run, since the codec wants both in the segment."""
    src = alloc_or_raise(sample.nbytes)  # leak: the run for the result may be refused with ArenaError, which is caught in the worker
    dst = alloc_or_raise(sample.size * np.dtype(out_dtype).itemsize)  # clean: released in the finally
    try:
        view(src, sample.shape, sample.dtype)[...] = sample
        view(dst, sample.shape, out_dtype)[...] = view(src, sample.shape, sample.dtype)
        return view(dst, sample.shape, out_dtype).copy()
    finally:
        release(dst, sample.size * np.dtype(out_dtype).itemsize)
        release(src, sample.nbytes)


def worker(q, jobs):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        job = jobs.get()
        if job is None:
            for key in list(_staged):
                unstage(key)
            q.put(None)
            return
        key, fn = job
        try:
            out = convert(fn(), np.int64)
            send_now(q, key, out)
        except ArenaError:
            traceback.print_exc()
            q.put((key, None, b""))


def receive(q):
    """Yields (key, array copy) until a worker says it is done."""
    while True:
        msg = q.get()
        if msg is None:
            return
        if msg[1] is None:
            if msg[2]:
                yield msg[0], pickle.loads(msg[2])
            continue
        key, first, nbytes, shape, dt = msg
        out = view(first, shape, np.dtype(dt)).copy()
        release(first, nbytes)
        yield key, out


def borrow(first, nbytes):
    """Count a reader of a run that is kept; the last one to leave releases it."""
    entry = _borrowed.setdefault(first, [nbytes, 0])
    entry[1] += 1
    return first


def leave(first):
    entry = _borrowed[first]
    entry[1] -= 1
    if entry[1] == 0:
        del _borrowed[first]
        release(first, entry[0])


def publish(array, readers):
    """One run for several readers in this process, each of which calls leave()."""
    first = alloc_or_raise(array.nbytes)  # clean: near miss, the count of readers decides who releases it
    view(first, array.shape, array.dtype)[...] = array
    borrow(first, array.nbytes)  # clean: our own share keeps the run while the readers are told, see leave below
    for r in readers:
        r(borrow(first, array.nbytes), array.shape)  # clean: near miss, each reader leaves for itself
    leave(first)
    return len(readers)


def mean_over(q, n, shape):
    """Average of n published gradients, accumulated in a run that other readers may look at."""
    acc = alloc(int(np.prod(shape)) * 4)  # leak: when the queue ends early the loop falls through to the last return and nothing releases the run
    if acc < 0:
        return None
    total = view(acc, shape, np.float32)
    total[...] = 0
    got = 0
    for _, array in receive(q):
        total += array
        got += 1
        if got == n:
            out = total / n
            release(acc, int(np.prod(shape)) * 4)
            return out
    return None


def start(n_workers, launch, nbytes=1 << 30):
    create("arena-%d" % os.getpid(), nbytes)
    jobs, q = Queue(), Queue()
    for _ in range(n_workers):
        launch(worker, (q, jobs))
    return jobs, q
