"""Client side of the job's key-value store.

A client keeps a handful of connections because a blocking WAIT occupies one.
"""
from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import random
import socket
import struct
import threading
import time
import weakref

_logger = logging.getLogger(__name__)
_FRAME = struct.Struct("!BI")

OP_GET, OP_SET, OP_ADD, OP_WAIT, OP_PING = range(5)


class StoreError(Exception):
    pass


class StoreTimeout(StoreError):
    pass


class ConnectionBroken(StoreError):
    pass


class Channel:
    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.born = time.monotonic()
        self.broken = False

    def call(self, op: int, payload: bytes, timeout: float) -> bytes:
        try:
            self._sock.settimeout(timeout)
            self._sock.sendall(_FRAME.pack(op, len(payload)) + payload)
            status, n = _FRAME.unpack(self._exactly(_FRAME.size))
            body = self._exactly(n)
        except socket.timeout as exc:
            self.broken = True
            raise StoreTimeout(str(op)) from exc
        except OSError as exc:
            self.broken = True
            raise ConnectionBroken(str(exc)) from exc
        if status:
            raise StoreError(body.decode())
        return body

    def _exactly(self, n: int) -> bytes:
        out = bytearray()
        while len(out) < n:
            piece = self._sock.recv(n - len(out))
            if not piece:
                raise OSError("closed by the store")
            out += piece
        return bytes(out)

    def close(self) -> None:
        self._sock.close()


class ChannelPool:
    def __init__(self, addr: tuple[str, int], size: int = 4, max_age: float = 600.0):
        self.addr = addr
        self.size = size
        self.max_age = max_age
        self._idle: collections.deque[Channel] = collections.deque()
        self._slots = threading.BoundedSemaphore(size)
        self._mu = threading.Lock()

    def _dial(self) -> Channel:
        last = None
        for attempt in range(5):
            try:
                sock = socket.create_connection(self.addr, timeout=3.0)  # clean: owned by the channel that is returned
                return Channel(sock)
            except OSError as exc:
                last = exc
                time.sleep(min(2.0, 0.1 * 2 ** attempt) * random.random())
        raise ConnectionBroken(f"{self.addr}: {last}")

    def get(self) -> Channel:
        self._slots.acquire()  # leak: _dial() raises ConnectionBroken and the slot of the semaphore is not released
        with self._mu:
            while self._idle:
                ch = self._idle.pop()  # clean: a channel that is too old is closed on purpose, others are returned
                if time.monotonic() - ch.born < self.max_age:
                    return ch
                ch.close()
        return self._dial()  # clean: returned as it is

    def try_get(self) -> Channel | None:
        if not self._slots.acquire(blocking=False):  # clean: near miss, released in the handler and else put() does it
            return None
        try:
            with self._mu:
                if self._idle:
                    return self._idle.pop()  # clean: returned
            return self._dial()  # clean: returned as it is
        except ConnectionBroken:
            self._slots.release()
            return None

    def put(self, ch: Channel) -> None:
        if ch.broken:
            ch.close()
        else:
            with self._mu:
                self._idle.append(ch)
        self._slots.release()

    @contextlib.contextmanager
    def channel(self):
        ch = self.get()  # clean: put in finally
        try:
            yield ch
        finally:
            self.put(ch)

    def ping_idle(self) -> int:
        """Drop idle channels that the store has closed."""
        alive = []
        with self._mu:
            while self._idle:
                ch = self._idle.popleft()  # leak: a channel with a StoreTimeout is neither closed nor put into alive
                try:
                    ch.call(OP_PING, b"", 0.5)
                    alive.append(ch)
                except StoreTimeout:
                    _logger.info("ping timed out")
                except StoreError:
                    ch.close()
            self._idle.extend(alive)
        return len(alive)

    def close(self) -> None:
        with self._mu:
            while self._idle:
                self._idle.pop().close()  # clean: closed at once


def retrying(times: int):
    def deco(fn):
        @functools.wraps(fn)
        def inner(self, *args, **kw):
            for n in range(times):
                try:
                    return fn(self, *args, **kw)
                except ConnectionBroken:
                    if n == times - 1:
                        raise
                    time.sleep(0.05 * 2 ** n)
        return inner
    return deco


class StoreClient:
    def __init__(self, pool: ChannelPool, prefix: str = ""):
        self.pool = pool
        self.prefix = prefix
        self._watches: dict[str, Watch] = {}

    def _key(self, key: str) -> bytes:
        return f"{self.prefix}/{key}".encode()

    @retrying(3)
    def get(self, key: str, timeout: float = 10.0) -> bytes:
        with self.pool.channel() as ch:  # clean: the context manager puts it
            return ch.call(OP_GET, self._key(key), timeout)

    @retrying(3)
    def set(self, key: str, value: bytes, timeout: float = 10.0) -> None:
        ch = self.pool.get()  # leak: call() raises ConnectionBroken, the decorator retries with another channel
        ch.call(OP_SET, self._key(key) + b"\0" + value, timeout)
        self.pool.put(ch)

    def add(self, key: str, n: int = 1) -> int:
        ch = self.pool.get()  # clean: near miss, put after a StoreError and after success
        try:
            raw = ch.call(OP_ADD, self._key(key) + b"\0" + str(n).encode(), 10.0)
        except StoreError:
            self.pool.put(ch)
            raise
        self.pool.put(ch)
        return int(raw)

    def wait(self, keys: list[str], timeout: float) -> bool:
        ch = self.pool.get()  # leak: the StoreTimeout handler returns False with the channel
        try:
            ch.call(OP_WAIT, json.dumps([self._key(k).decode() for k in keys]).encode(), timeout)
        except StoreTimeout:
            return False
        except StoreError:
            self.pool.put(ch)
            raise
        self.pool.put(ch)
        return True

    def watch(self, key: str, callback) -> "Watch":
        """One watch for each key; a second call changes the callback."""
        w = self._watches.get(key)
        if w is not None:
            w.callback = callback
            return w
        w = Watch(self, key, callback)  # clean: near miss, in the table until close() stops it
        self._watches[key] = w
        w.start()
        return w

    def close(self) -> None:
        while self._watches:
            self._watches.popitem()[1].stop()
        self.pool.close()


class Watch:
    """Polls a key over its own channel in a thread."""

    def __init__(self, client: StoreClient, key: str, callback):
        self.client = weakref.proxy(client)
        self.pool = client.pool
        self.key = key
        self.callback = callback
        self.ch = client.pool.get()  # leak: the polling thread replaces ch after a ConnectionBroken and the broken one is not put
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _poll(self) -> None:
        seen = None
        while not self._stop.wait(1.0):
            try:
                value = self.ch.call(OP_GET, self.client._key(self.key), 5.0)
            except ConnectionBroken:
                fresh = self.pool.try_get()  # leak: it becomes ch and the next ConnectionBroken replaces it in the same way
                if fresh is not None:
                    self.ch = fresh
                continue
            except StoreError:
                continue
            if value != seen:
                seen = value
                self.callback(self.key, value)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.pool.put(self.ch)
