"""Online feature reads for the ranking service. Module-level state on purpose: one process, one store."""
import contextlib
import functools
import logging
import os
import socket
import struct
import threading
from queue import Empty, LifoQueue

import numpy as np

log = logging.getLogger("featstore")

HOST = os.environ.get("FEAT_HOST", "features.internal")
PORT = int(os.environ.get("FEAT_PORT", "6399"))
MAX_CONNS = 32
_MAGIC = b"FS02"

_parked: LifoQueue = LifoQueue()
_slots = threading.BoundedSemaphore(MAX_CONNS)
_pinned = {}
_pinned_lock = threading.Lock()
_draining = False


class StoreDown(Exception): ...
class BadReply(Exception): ...

def _dial():
    sock = socket.create_connection((HOST, PORT), timeout=1.5)  # leak: a store with another magic makes this raise StoreDown with the socket open
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_MAGIC)
    if sock.recv(4) != _MAGIC:
        raise StoreDown("store answers in another protocol")
    return sock


def borrow(timeout=1.0):
    """A connected socket. Must be handed to give() or to scrap()."""
    if not _slots.acquire(timeout=timeout):  # clean: near miss, released in the handler when there is no connection to go with it
        raise StoreDown("all connections are in use")
    with contextlib.suppress(Empty):
        return _parked.get_nowait()  # clean: returned
    try:
        return _dial()  # clean: returned
    except (OSError, StoreDown) as exc:
        _slots.release()
        raise StoreDown(str(exc)) from exc


def give(sock):
    sock.close() if _draining else _parked.put(sock)
    _slots.release()


def scrap(sock):
    with contextlib.suppress(OSError):
        sock.close()
    _slots.release()


@contextlib.contextmanager
def conn():
    sock = borrow()  # clean: three ways out and each of them gives or scraps
    try:
        yield sock
    except (OSError, BadReply):
        scrap(sock)
        raise
    except BaseException:
        give(sock)
        raise
    else:
        give(sock)


def with_conn(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        with conn() as sock:  # clean: with
            return fn(sock, *args, **kwargs)
    return inner


def _ask(sock, verb, *keys):
    body = b"\0".join(k.encode() for k in keys)
    sock.sendall(struct.pack("<4sI", verb, len(body)) + body)
    status, size = struct.unpack("<4sI", _exactly(sock, 8))
    payload = _exactly(sock, size)
    if status != b"OKAY":
        raise BadReply(payload[:80].decode("utf8", "replace"))
    return payload


def _exactly(sock, n):
    data = sock.recv(n, socket.MSG_WAITALL)
    if len(data) < n:
        raise OSError("store hung up")
    return data


@with_conn
def read_vector(sock, entity):
    return np.frombuffer(_ask(sock, b"VGET", entity), dtype=np.float32)


def read_many(entities, width=64):
    """Pipelines the reads in chunks over one connection."""
    sock = borrow()  # leak: a BadReply is turned into a None with the connection still out
    rows = []
    try:
        for i in range(0, len(entities), width):
            rows.append(np.frombuffer(_ask(sock, b"MGET", *entities[i:i + width]), dtype=np.float32))
    except BadReply as exc:
        log.warning("read_many: %s", exc)
        return None
    except OSError:
        scrap(sock)
        raise
    give(sock)
    return np.concatenate(rows) if rows else np.empty(0, np.float32)


def read_with_fallback(entity, default):
    try:
        sock = borrow(timeout=0.05)  # clean: near miss, given in the else branch, scrapped in the handler
    except StoreDown:
        return default
    try:
        raw = _ask(sock, b"VGET", entity)
    except (BadReply, OSError) as exc:
        log.info("fallback for %s: %s", entity, exc)
        scrap(sock)
        return default
    else:
        give(sock)
    return np.frombuffer(raw, dtype=np.float32)


def pin(model):
    """Reserve a connection for one model, so that its tail latency does not depend on the others."""
    with _pinned_lock:
        if model not in _pinned:
            _pinned[model] = borrow(timeout=5.0)  # clean: given by unpin() or drain()
        return _pinned[model]


def unpin(model):
    with _pinned_lock:
        sock = _pinned.pop(model, None)
    if sock is not None:
        give(sock)


def repin(model):
    """After a failover: point the model at the new primary."""
    fresh = borrow(timeout=5.0)  # clean: goes into the table at once, see unpin()
    with _pinned_lock:
        old, _pinned[model] = _pinned.get(model), fresh
    if old is not None:
        scrap(old)


def compare_stores(entity, other):
    """Reads from the primary and from the store behind `other()`, returns the largest difference."""
    ours = borrow()  # leak: the early return for an entity that is unknown here does not give it back
    raw = _ask(ours, b"VTRY", entity)
    if not raw:
        return None
    give(ours)
    return float(np.abs(np.frombuffer(raw, dtype=np.float32) - other(entity)).max())


class Cursor:
    """Server-side scan. Occupies its connection until it is exhausted or closed."""

    def __init__(self, sock, prefix):
        self.sock = sock
        self.token = _ask(sock, b"SCAN", prefix).decode()
        self.seen = 0

    def __iter__(self):
        while self.sock is not None:
            raw = _ask(self.sock, b"NEXT", self.token)
            if not raw:
                self.close()
                return
            self.seen += 1
            yield raw

    def close(self):
        sock, self.sock = self.sock, None
        if sock is not None:
            give(sock)


def scan(prefix):
    sock = borrow()  # leak: the constructor of Cursor raises BadReply for a refused prefix, then nobody has the connection
    return Cursor(sock, prefix)


def count(prefix, limit=1_000_000):
    cur = scan(prefix)  # clean: closed by the finally
    try:
        for raw in cur:
            if cur.seen >= limit:
                break
        return cur.seen
    finally:
        cur.close()


def first(prefix):
    """The first record under a prefix, or None."""
    cur = scan(prefix)  # leak: the return from the loop abandons the cursor together with its connection
    for raw in cur:
        return raw
    return None


def export(prefix, path):
    with contextlib.closing(scan(prefix)) as cur, open(path, "wb") as fh:  # clean: both closed by the with
        for raw in cur:
            fh.write(struct.pack("<I", len(raw)) + raw)
    return cur.seen


class Refresher(threading.Thread):
    """Pulls the newest embedding table every few seconds."""

    def __init__(self, table, every=5.0):
        super().__init__(daemon=True)
        self.table, self.every = table, every
        self.halt = threading.Event()
        self.current = self.sock = None

    def run(self):
        while not self.halt.wait(self.every):
            try:
                if self.sock is None:
                    self.sock = borrow()  # clean: near miss, kept over the rounds, scrapped and forgotten on an error, given at the end
                self.current = np.frombuffer(_ask(self.sock, b"TABL", self.table), dtype=np.float16)
            except (OSError, BadReply, StoreDown) as exc:
                log.warning("refresh of %s: %s", self.table, exc)
                sock, self.sock = self.sock, None
                if sock is not None:
                    scrap(sock)
        if self.sock is not None:
            give(self.sock)


def drain():
    global _draining
    _draining = True
    for model in list(_pinned):
        unpin(model)
    while not _parked.empty():
        _parked.get_nowait().close()  # clean: closed in the same expression
