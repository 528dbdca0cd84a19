"""Blocking RPC channels to model hosts: pool, retries, hedged calls, streaming."""
from __future__ import annotations

import collections
import contextlib
import itertools
import socket
import struct
import threading
import time
from typing import Callable, Iterator, Optional


class ChannelBroken(Exception):
    pass


class NoChannel(Exception):
    pass


class Channel:
    _ids = itertools.count()

    def __init__(self, host: str, port: int):
        self.id = next(self._ids)
        self.sock = socket.create_connection((host, port), timeout=5)
        self.healthy = True
        self.last_used = time.monotonic()

    def call(self, payload: bytes) -> bytes:
        try:
            self.sock.sendall(struct.pack("!I", len(payload)) + payload)
            (n,) = struct.unpack("!I", self._exact(4))
            return self._exact(n)
        except OSError as e:
            self.healthy = False
            raise ChannelBroken(str(e)) from e

    def _exact(self, n: int) -> bytes:
        chunks = []
        while n:
            part = self.sock.recv(n)
            if not part:
                raise OSError("peer went away")
            chunks.append(part)
            n -= len(part)
        return b"".join(chunks)

    def shutdown(self) -> None:
        self.sock.close()


class ChannelPool:
    def __init__(self, host: str, port: int, limit: int = 16, max_idle: float = 30.0):
        self.host, self.port, self.limit, self.max_idle = host, port, limit, max_idle
        self._idle: collections.deque[Channel] = collections.deque()
        self._out = 0
        self._cv = threading.Condition()

    def get(self, timeout: float = 2.0) -> Channel:
        deadline = time.monotonic() + timeout
        with self._cv:
            while True:
                if self._idle:
                    self._out += 1
                    return self._idle.popleft()
                if self._out < self.limit:
                    self._out += 1
                    break
                left = deadline - time.monotonic()
                if left <= 0 or not self._cv.wait(left):
                    raise NoChannel(self.host)
        try:
            return Channel(self.host, self.port)
        except OSError:
            with self._cv:
                self._out -= 1
                self._cv.notify()
            raise

    def put(self, ch: Channel) -> None:
        with self._cv:
            self._out -= 1
            if ch.healthy:
                ch.last_used = time.monotonic()
                self._idle.append(ch)
            else:
                ch.shutdown()
            self._cv.notify()

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        ch = self.get()  # clean: put back in finally of the context manager
        try:
            yield ch
        finally:
            self.put(ch)

    @contextlib.contextmanager
    def healthy_channel(self) -> Iterator[Channel]:
        ch = self.get()  # leak: an error in the body skips the put after the yield
        yield ch
        self.put(ch)


class RpcError(Exception):
    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def ping(pool: ChannelPool) -> bool:
    ch = pool.get()  # clean: finally puts it back on both results
    try:
        return ch.call(b"ping") == b"pong"
    except ChannelBroken:
        return False
    finally:
        pool.put(ch)


def call_once(pool: ChannelPool, payload: bytes) -> bytes:
    with pool.channel() as ch:  # clean: with statement
        reply = ch.call(payload)
    if reply[:1] == b"E":
        raise RpcError(reply[1])
    return reply[1:]


def call_retrying(pool: ChannelPool, payload: bytes, attempts: int = 3) -> bytes:
    last: Optional[Exception] = None
    for n in range(attempts):
        ch = pool.get()  # leak: the broken channel is not put back before the next attempt
        try:
            reply = ch.call(payload)
        except ChannelBroken as e:
            last = e
            time.sleep(0.05 * 2**n)
            continue
        pool.put(ch)
        return reply
    raise RpcError(14) from last


def call_idempotent(pool: ChannelPool, payload: bytes, attempts: int = 3) -> bytes:
    for n in range(attempts):
        ch = pool.get()  # clean: near miss, the continue runs through finally
        try:
            return ch.call(payload)
        except ChannelBroken:
            if n == attempts - 1:
                raise
            continue
        finally:
            pool.put(ch)
    raise RpcError(14)


def mirrored_write(primary: ChannelPool, replica: ChannelPool, payload: bytes) -> bool:
    first = primary.get()  # leak: not put back when the replica has no channel
    try:
        second = replica.get(timeout=0.2)  # clean: put back in finally
    except NoChannel:
        return False
    try:
        ok = first.call(payload) == b"ok" and second.call(payload) == b"ok"
    except ChannelBroken:
        ok = False
    finally:
        replica.put(second)
        primary.put(first)
    return ok


def quorum_write(pools: list[ChannelPool], payload: bytes) -> int:
    held: list[tuple[ChannelPool, Channel]] = []
    acks = 0
    try:
        for p in pools:
            try:
                held.append((p, p.get(timeout=0.1)))  # clean: near miss, every pair in held is put back
            except NoChannel:
                continue
        for _, ch in held:
            try:
                acks += ch.call(payload) == b"ok"
            except ChannelBroken:
                pass
    finally:
        for p, ch in held:
            p.put(ch)
    return acks


class Stream:
    """Server streaming call; owns its channel until closed."""

    def __init__(self, pool: ChannelPool, method: bytes):
        self.pool = pool
        self.method = method
        self.ch: Optional[Channel] = None

    def __enter__(self) -> "Stream":
        self.ch = self.pool.get()  # leak: __exit__ leaves early when the stream was cancelled
        self.cancelled = False
        return self

    def frames(self) -> Iterator[bytes]:
        while True:
            frame = self.ch.call(self.method)
            if frame == b"":
                return
            if frame == b"cancel":
                self.cancelled = True
                return
            yield frame

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.cancelled:
            return False
        self.pool.put(self.ch)
        self.ch = None
        return False


class Session:
    """Sticky channel for stateful decoding. reconnect() swaps a broken one."""

    def __init__(self, pool: ChannelPool):
        self.pool = pool
        self.ch = pool.get()  # clean: close() puts it back

    def reconnect(self) -> None:
        old = self.ch
        self.ch = self.pool.get()  # clean: near miss, the channel it replaces is put back
        old.healthy = False
        self.pool.put(old)

    def step(self, token: bytes) -> bytes:
        return self.ch.call(token)

    def close(self) -> None:
        self.pool.put(self.ch)


class FailoverSession:
    def __init__(self, pools: list[ChannelPool]):
        self.pools = pools
        self.active = 0
        self.ch = pools[0].get()  # leak: failover() overwrites it

    def failover(self) -> None:
        self.active = (self.active + 1) % len(self.pools)
        self.ch = self.pools[self.active].get()  # leak: a second failover overwrites the channel of the first

    def close(self) -> None:
        self.pools[self.active].put(self.ch)


def on_thread(pool: ChannelPool, payload: bytes, done: Callable[[Optional[bytes]], None]) -> threading.Thread:
    ch = pool.get()  # clean: the worker thread puts it back in finally

    def work() -> None:
        reply = None
        try:
            reply = ch.call(payload)
        except ChannelBroken:
            reply = None
        finally:
            pool.put(ch)
        done(reply)

    t = threading.Thread(target=work, daemon=True)
    t.start()
    return t
