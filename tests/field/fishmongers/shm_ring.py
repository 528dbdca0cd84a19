"""Slots in one shared memory segment, filled by decoder threads.

Module state on purpose: there is one ring per process, and the decoders of
three libraries have to find it.
"""
import contextlib
import logging
import queue
import threading
from collections import namedtuple
from multiprocessing.shared_memory import SharedMemory

import numpy as np

log = logging.getLogger(__name__)

SLOT_BYTES = 4 << 20

Ticket = namedtuple("Ticket", "slot shape dtype")

_segments = {}
_free = []
_cv = threading.Condition()
_published = {}
_local = threading.local()
_stats = {"grabs": 0, "waits": 0, "too_large": 0}


class SampleTooLarge(ValueError):
    pass


def setup(name, slots):
    if "ring" in _segments:
        return
    _segments["ring"] = SharedMemory(name, create=True, size=slots * SLOT_BYTES)  # clean: made once, teardown() unlinks it
    _free.extend(range(slots))


def teardown():
    segment = _segments.pop("ring", None)
    if segment is not None:
        segment.close()
        segment.unlink()
    log.info("ring closed, %s", _stats)


def grab(timeout=None):
    """A free slot number, or None after the timeout."""
    with _cv:
        _stats["grabs"] += 1
        if not _free:
            _stats["waits"] += 1
            if not _cv.wait_for(lambda: _free, timeout):
                return None
        return _free.pop()  # clean: returned


def grab_many(n, timeout=None):
    taken = []
    for _ in range(n):
        slot = grab(timeout)  # leak: a timeout half way returns an empty list and forgets the slots before it
        if slot is None:
            log.debug("wanted %d slots, got %d", n, len(taken))
            return []
        taken.append(slot)
    return taken


def drop(slot):
    with _cv:
        _free.append(slot)
        _cv.notify()


def view(slot, shape, dtype):
    base = slot * SLOT_BYTES
    return np.ndarray(shape, dtype, buffer=_segments["ring"].buf, offset=base)


@contextlib.contextmanager
def borrowed(timeout=None):
    slot = grab(timeout)  # clean: dropped in the finally unless it is None
    try:
        yield slot
    finally:
        if slot is not None:
            drop(slot)


def write(arr):
    """Copy an array into a slot; the ticket belongs to the caller."""
    slot = grab(timeout=1.0)  # leak: an array that does not fit raises with the slot taken
    if slot is None:
        return None
    if arr.nbytes > SLOT_BYTES:
        _stats["too_large"] += 1
        raise SampleTooLarge(f"{arr.nbytes} bytes")
    view(slot, arr.shape, arr.dtype)[...] = arr
    return Ticket(slot, arr.shape, arr.dtype)


def decode_loop(paths, ready, decode):
    while (path := paths.get()) is not None:
        slot = grab()  # leak: a file that cannot be decoded is skipped with the slot taken
        try:
            shape, dtype = decode(path, _segments["ring"].buf, slot * SLOT_BYTES)
        except OSError as exc:
            log.warning("skipping %s: %s", path, exc)
            continue
        ready.put(Ticket(slot, shape, dtype))
    ready.put(None)


def copy_loop(arrays, ready):
    for arr in arrays:
        while True:
            try:
                ticket = write(arr)  # clean: near miss, goes through the queue to batches(), which drops it
            except SampleTooLarge:
                break
            if ticket is not None:
                ready.put(ticket)
                break
    ready.put(None)


def augment(ticket, fn):
    """Apply fn into a second slot if there is one, in place otherwise."""
    extra = grab(timeout=0.05)  # clean: near miss, replaces the ticket's own slot, which is dropped instead
    src = view(*ticket)
    if extra is None:
        src[...] = fn(src)
        return ticket
    out = fn(src)
    view(extra, out.shape, out.dtype)[...] = out
    drop(ticket.slot)
    return Ticket(extra, out.shape, out.dtype)


def batches(ready, size, producers=1, drop_last=False):
    """Stacked copies, until every producer has sent its end marker."""
    pending = []
    try:
        while producers:
            ticket = ready.get()
            if ticket is None:
                producers -= 1
                continue
            pending.append(ticket)
            if len(pending) == size:
                yield _stack(pending)
        if pending and not drop_last:
            yield _stack(pending)
    finally:
        for ticket in pending:
            drop(ticket.slot)
        while producers:
            ticket = ready.get()
            if ticket is None:
                producers -= 1
            else:
                drop(ticket.slot)


def _stack(pending):
    out = np.stack([view(*t) for t in pending])
    while pending:
        drop(pending.pop().slot)
    return out


def publish(key, arr):
    """Make the newest version of some table (vocabulary, weights) visible."""
    with borrowed(timeout=5.0) as probe:  # clean: context manager
        if probe is None:
            raise TimeoutError("the ring is full")
    slot = grab()  # leak: retract() pops the entry and does not drop its slot
    view(slot, arr.shape, arr.dtype)[...] = arr
    old = _published.get(key)
    _published[key] = Ticket(slot, arr.shape, arr.dtype)
    if old is not None:
        drop(old.slot)


def retract(key):
    ticket = _published.pop(key, None)
    if ticket is None:
        return False
    return True


def scratch(shape, dtype):
    """A buffer for this thread only, kept until the thread calls leave()."""
    if getattr(_local, "slot", None) is None:
        _local.slot = grab()  # leak: leave() drops it only when commit() has run since
        _local.dirty = False
    return view(_local.slot, shape, dtype)


def commit(out, shape, dtype):
    _local.dirty = True
    out[...] = view(_local.slot, shape, dtype)


def leave():
    if getattr(_local, "dirty", False):
        drop(_local.slot)
        _local.dirty = False
    _local.slot = None


def mean_of(arrays):
    """Average arrays of one shape without allocating on the heap."""
    first = write(arrays[0])  # clean: dropped in the finally
    if first is None:
        return None
    acc = view(*first)
    try:
        for arr in arrays[1:]:
            acc += arr
        return acc / len(arrays)
    finally:
        drop(first.slot)


def transpose_all(arr, parts):
    slots = grab_many(parts, timeout=2.0)  # clean: all of them dropped in the loop of the finally
    out = []
    try:
        for slot, part in zip(slots, np.array_split(arr, parts)):
            tmp = view(slot, part.T.shape, part.dtype)
            tmp[...] = part.T
            out.append(tmp.copy())
    finally:
        for slot in slots:
            drop(slot)
    return out


def inspect(name, slots):
    """For the debugger: look into the ring of another process."""
    segment = SharedMemory(name)  # clean: closed in the finally
    try:
        raw = np.frombuffer(bytes(segment.buf), np.uint8)
        return [int(raw[i * SLOT_BYTES :][:64].sum()) for i in range(slots)]
    finally:
        segment.close()


def run(paths, decode, size, threads=4):
    todo, ready = queue.Queue(), queue.Queue()
    for path in [*paths, *[None] * threads]:
        todo.put(path)
    pool = [threading.Thread(target=decode_loop, args=(todo, ready, decode)) for _ in range(threads)]
    for t in pool:
        t.start()
    yield from batches(ready, size, producers=threads)
    for t in pool:
        t.join()
