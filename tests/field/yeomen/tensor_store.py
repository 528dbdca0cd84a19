"""tensor_store: named tensors in shared memory, for processes of one host.

Module-level state, one store per process.  A segment is a 64 byte header and
the raw data.  `put` creates, `get` attaches, `sweep` cleans up after the dead.
"""
import errno
import fcntl
import logging
import os
import struct
from contextlib import contextmanager
from multiprocessing import shared_memory

import numpy as np

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sIII4Q")
_MAGIC = b"TSTORE\x00\x02"
_DTYPES = {"float32": 1, "float16": 2, "int64": 3, "uint8": 4}
_NAMES = {v: k for k, v in _DTYPES.items()}

_mine = {}       # name -> SharedMemory that this process made
_attached = {}   # name -> [SharedMemory, count]
_root = os.environ.get("TSTORE_DIR", "/tmp/tstore")


class BadSegment(Exception):
    pass


class NotThere(KeyError):
    pass


def _path(name):
    return os.path.join(_root, name + ".lock")


def _seg(name):
    return "tstore_" + name.replace("/", "_")


# --- locks

def _lockfile(name, wait=True):
    """Descriptor of the locked file of name, None when it is taken."""
    fd = os.open(_path(name), os.O_RDWR | os.O_CREAT, 0o644)  # leak: the descriptor stays open when somebody else has the lock
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return None
        os.close(fd)
        raise
    return fd


def _unlock(fd):
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextmanager
def locked(name):
    fd = _lockfile(name)  # clean: unlocked and closed in the finally
    try:
        yield
    finally:
        _unlock(fd)


# --- attaching

def attach(name):
    slot = _attached.get(name)
    if slot is None:
        try:
            shm = shared_memory.SharedMemory(_seg(name))  # clean: near miss, in the table until the count is zero
        except FileNotFoundError:
            raise NotThere(name) from None
        slot = _attached[name] = [shm, 0]
    slot[1] += 1
    return slot[0]


def detach(name):
    slot = _attached[name]
    slot[1] -= 1
    if slot[1] == 0:
        del _attached[name]
        slot[0].close()


def _describe(shm):
    magic, code, ndim, _, *dims = _HEADER.unpack_from(shm.buf)
    if magic != _MAGIC:
        raise BadSegment(shm.name)
    return _NAMES[code], tuple(dims[:ndim])


def _wrap(shm):
    dtype, shape = _describe(shm)
    return np.ndarray(shape, dtype, buffer=shm.buf, offset=_HEADER.size)


# --- the store

def put(name, array):
    if name in _mine:
        remove(name)
    shm = shared_memory.SharedMemory(_seg(name), create=True, size=_HEADER.size + array.nbytes)  # leak: a dtype that has no code raises, and nobody has the segment
    code = _DTYPES.get(str(array.dtype))
    if code is None:
        raise TypeError(f"cannot store {array.dtype}")
    dims = list(array.shape) + [0] * (4 - array.ndim)
    _HEADER.pack_into(shm.buf, 0, _MAGIC, code, array.ndim, 0, *dims)
    np.ndarray(array.shape, array.dtype, buffer=shm.buf, offset=_HEADER.size)[...] = array
    _mine[name] = shm


def put_scratch(name, nbytes):
    """Uninitialised bytes under a name that may change its size."""
    name = "scratch/" + name
    fresh = shared_memory.SharedMemory(create=True, size=_HEADER.size + nbytes)  # leak: a second scratch of one name overwrites the entry of the first
    _HEADER.pack_into(fresh.buf, 0, _MAGIC, _DTYPES["uint8"], 1, 0, nbytes, 0, 0, 0)
    _mine[name] = fresh
    return _wrap(fresh)


def _discard(shm):
    shm.close()
    shm.unlink()


def remove(name):
    shm = _mine.pop(name, None)
    if shm is None:
        raise NotThere(name)
    _discard(shm)


def get(name, copy=None):
    """Array of a name; small ones are copied, the others need a detach."""
    shm = attach(name)  # leak: a copy is returned without a detach, and the caller of a copy has none to do
    arr = _wrap(shm)
    if copy or (copy is None and arr.nbytes < 4096):
        return arr.copy()
    return arr


@contextmanager
def reading(name):
    shm = attach(name)  # clean: detached in the finally
    try:
        yield _wrap(shm)
    finally:
        detach(name)


def shape_of(name):
    shm = attach(name)  # clean: the finally is reached by the return and by BadSegment alike
    try:
        return _describe(shm)
    except BadSegment:
        return None
    finally:
        detach(name)


def scan(names):
    for name in names:
        try:
            shm = attach(name)  # leak: a segment of another version takes the continue without a detach
        except NotThere:
            continue
        try:
            dtype, shape = _describe(shm)
        except BadSegment:
            _log.warning("%s has another version", name)
            continue
        yield name, dtype, shape
        detach(name)


def total(names):
    return sum(int(np.prod(shape)) for _, _, shape in scan(names))


class View:
    """Array that keeps its segment attached while it lives."""

    def __init__(self, name):
        self.name = name
        self._open = False
        shm = attach(name)  # clean: near miss, close() detaches under the flag that is set here
        self._open = True
        self.array = np.frombuffer(shm.buf, np.uint8, offset=_HEADER.size)

    def close(self):
        if self._open:
            self._open = False
            self.array = None
            detach(self.name)


def concat(names, out):
    """Copies segments into out, one behind the other."""
    at = 0
    views = []
    try:
        for n in names:
            views.append(View(n))  # clean: near miss, what was opened before a NotThere is closed, too
        for v in views:
            out[at:at + v.array.nbytes] = v.array
            at += v.array.nbytes
    except NotThere as exc:
        _log.error("no segment %s", exc)
        at = -1
    finally:
        for v in views:
            v.close()
    return at


def checksum(name):
    v = View(name)  # clean: closed on both paths
    if v.array.nbytes == 0:
        v.close()
        return 0
    value = int(v.array.astype(np.uint64).sum() & 0xFFFFFFFF)
    v.close()
    return value


def sweep():
    """Unlinks segments whose makers are gone."""
    gone = []
    for entry in sorted(os.listdir(_root)):
        name = entry[: -len(".lock")]
        if name in _mine:
            continue
        fd = _lockfile(name, wait=False)  # clean: None is somebody else's lock, all others are unlocked
        if fd is None:
            continue
        try:
            stale = shared_memory.SharedMemory(_seg(name))  # clean: discarded in the else
        except FileNotFoundError:
            _log.debug("%s: lock without segment", name)
        else:
            _discard(stale)
            gone.append(name)
        finally:
            _unlock(fd)
    return gone


def close_all():
    while _mine:
        _discard(_mine.popitem()[1])
