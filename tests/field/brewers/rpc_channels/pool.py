"""A bounded pool of channels to one address."""
from __future__ import annotations

import threading
import time
from typing import Callable, List, Optional, Set


class RpcError(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class PoolClosed(RuntimeError):
    pass


class Channel:
    def __init__(self, address: str) -> None:
        self.address = address
        self.broken = False
        self.used_at = time.monotonic()
        self.calls = 0

    def call(self, method: str, payload: bytes) -> bytes:
        self.calls += 1
        if method == "fail":
            self.broken = True
            raise RpcError("UNAVAILABLE")
        if method == "missing":
            raise RpcError("NOT_FOUND")
        return method.encode() + b":" + payload

    def shutdown(self) -> None:
        self.broken = True


class ChannelPool:
    """At most `size` channels out; the permits bound them, the stack reuses them."""

    def __init__(self, address: str, size: int, max_idle: float = 60.0, dial: Optional[Callable[[str], Channel]] = None) -> None:
        self.address = address
        self.max_idle = max_idle
        self._dial = dial or Channel
        self._permits = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._stack: List[Channel] = []
        self._out: Set[Channel] = set()
        self._closed = False

    def checkout(self, timeout: float = 1.0) -> Optional[Channel]:
        if not self._permits.acquire(timeout=timeout):  # leak: dial failure is caught below and None returned with the permit gone
            return None
        chan = self._reuse()
        if chan is None:
            try:
                chan = self._dial(self.address)
            except OSError:
                return None
        with self._lock:
            self._out.add(chan)
        return chan

    def checkout_fresh(self) -> Channel:
        self._permits.acquire()  # clean: near miss, released when the dial fails, otherwise handed on with the channel
        try:
            chan = self._dial(self.address)
        except OSError as exc:
            self._permits.release()
            raise RpcError("UNAVAILABLE") from exc
        with self._lock:
            self._out.add(chan)
        return chan

    def _reuse(self) -> Optional[Channel]:
        now = time.monotonic()
        with self._lock:
            while self._stack:
                chan = self._stack.pop()
                if chan.broken or now - chan.used_at > self.max_idle:
                    chan.shutdown()
                    continue
                return chan
        return None

    def checkin(self, chan: Channel) -> None:
        with self._lock:
            self._out.discard(chan)
            if not chan.broken and not self._closed:
                chan.used_at = time.monotonic()
                self._stack.append(chan)
        self._permits.release()

    def resize_idle(self, keep: int) -> int:
        self._lock.acquire()  # leak: nothing to trim, returns 0 with the lock held
        if len(self._stack) <= keep:
            return 0
        extra, self._stack = self._stack[keep:], self._stack[:keep]
        self._lock.release()
        for chan in extra:
            chan.shutdown()
        return len(extra)

    def close(self) -> None:
        self._lock.acquire()  # clean: released on both ways
        if self._closed:
            self._lock.release()
            return
        self._closed = True
        idle, self._stack = self._stack, []
        self._lock.release()
        for chan in idle:
            chan.shutdown()

    def outstanding(self) -> int:
        with self._lock:
            return len(self._out)
