"""Streams layer weights from host memory to the device through a pool of pinned buffers."""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Iterable, Optional

try:
    import torch
except ImportError:  # CPU-only CI image
    torch = None


class TransferError(RuntimeError):
    pass


@dataclass(eq=False)
class PinnedBuf:
    capacity: int
    data: Any
    used: int = 0


class PinnedPool:
    def __init__(self, count: int, capacity: int) -> None:
        self._cv = threading.Condition()
        self._idle = [PinnedBuf(capacity, self._pin(capacity)) for _ in range(count)]
        self._out: set[int] = set()

    @staticmethod
    def _pin(nbytes: int):
        if torch is None:
            return bytearray(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def checkout(self, timeout: float = 30.0) -> PinnedBuf:
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout):
                raise TimeoutError("no pinned buffer")
            buf = self._idle.pop()
            self._out.add(id(buf))
            return buf

    def try_checkout(self) -> Optional[PinnedBuf]:
        with self._cv:
            if not self._idle:
                return None
            buf = self._idle.pop()
            self._out.add(id(buf))
            return buf

    def checkin(self, buf: PinnedBuf) -> None:
        with self._cv:
            self._out.discard(id(buf))
            buf.used = 0
            self._idle.append(buf)
            self._cv.notify()

    def grow(self, buf: PinnedBuf, nbytes: int) -> None:
        buf.data = self._pin(nbytes)
        buf.capacity = nbytes


@dataclass
class HostTensor:
    name: str
    payload: bytes
    is_meta: bool = False


class Device:
    def __init__(self) -> None:
        self.store: dict[str, bytes] = {}
        self.fail_next = 0

    def copy_async(self, name: str, buf: PinnedBuf) -> "Event":
        if self.fail_next:
            self.fail_next -= 1
            raise TransferError(name)
        self.store[name] = bytes(buf.data[:buf.used])
        return Event()


class Event:
    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


def fill(buf: PinnedBuf, payload: bytes) -> None:
    buf.data[:len(payload)] = payload
    buf.used = len(payload)


class WeightStreamer:
    def __init__(self, pool: PinnedPool, dev: Device, retries: int = 3) -> None:
        self.pool = pool
        self.dev = dev
        self.retries = retries
        self._inflight: dict[str, tuple[PinnedBuf, Event]] = {}
        self._warm: dict[str, PinnedBuf] = {}

    def upload_layer(self, tensors: Iterable[HostTensor]) -> int:
        n = 0
        for t in tensors:
            buf = self.pool.checkout()  # leak: the continue for meta tensors skips checkin
            if t.is_meta:
                continue
            fill(buf, t.payload)
            self.dev.copy_async(t.name, buf).synchronize()
            self.pool.checkin(buf)
            n += 1
        return n

    def upload_experts(self, tensors: Iterable[HostTensor], resident: set[str]) -> int:
        n = 0
        for t in tensors:
            if t.name in resident:
                continue
            buf = self.pool.checkout()  # clean: near miss, the continue stands before it and the second one gives back
            if len(t.payload) > buf.capacity:
                self.pool.checkin(buf)
                continue
            fill(buf, t.payload)
            self.dev.copy_async(t.name, buf).synchronize()
            self.pool.checkin(buf)
            n += 1
        return n

    def upload_with_retry(self, t: HostTensor) -> bool:
        for attempt in range(self.retries):
            buf = self.pool.checkout()  # leak: a failed attempt goes round the loop with the buffer still out
            fill(buf, t.payload)
            try:
                ev = self.dev.copy_async(t.name, buf)
            except TransferError:
                time.sleep(0.001 * 2 ** attempt)
                continue
            ev.synchronize()
            self.pool.checkin(buf)
            return True
        return False

    def upload_blocking(self, t: HostTensor) -> bool:
        buf = self.pool.checkout()  # clean: near miss, one buffer for all attempts, given back in finally
        try:
            fill(buf, t.payload)
            for attempt in range(self.retries):
                try:
                    self.dev.copy_async(t.name, buf).synchronize()
                    return True
                except TransferError:
                    if attempt == self.retries - 1:
                        return False
                    time.sleep(0.001 * 2 ** attempt)
            return False
        finally:
            self.pool.checkin(buf)

    def upload_pair(self, scale: HostTensor, weight: HostTensor) -> bool:
        """Quantised weights need scale and payload in flight together."""
        sbuf = self.pool.try_checkout()  # leak: not given back when the second buffer is missing
        if sbuf is None:
            return False
        wbuf = self.pool.try_checkout()  # clean: None-checked, both are given back below
        if wbuf is None:
            return False
        fill(sbuf, scale.payload)
        fill(wbuf, weight.payload)
        evs = [self.dev.copy_async(scale.name, sbuf), self.dev.copy_async(weight.name, wbuf)]
        for ev in evs:
            ev.synchronize()
        self.pool.checkin(sbuf)
        self.pool.checkin(wbuf)
        return True

    def upload_gate_up(self, gate: HostTensor, up: HostTensor) -> bool:
        a = self.pool.try_checkout()  # clean: near miss, whichever of the two exists goes back
        b = self.pool.try_checkout()  # clean: near miss, whichever of the two exists goes back
        ok = a is not None and b is not None
        if ok:
            fill(a, gate.payload)
            fill(b, up.payload)
            self.dev.copy_async(gate.name, a).synchronize()
            self.dev.copy_async(up.name, b).synchronize()
        for buf in (a, b):
            if buf is not None:
                self.pool.checkin(buf)
        return ok

    def upload_large(self, t: HostTensor) -> None:
        buf = self.pool.checkout()  # leak: rebound to a second buffer when the first is too small
        if buf.capacity < len(t.payload):
            buf = self.pool.checkout()  # clean: given back at the end
            self.pool.grow(buf, len(t.payload))
        fill(buf, t.payload)
        self.dev.copy_async(t.name, buf).synchronize()
        self.pool.checkin(buf)

    def upload_stream(self, chunks: Iterable[tuple[str, bytes]]) -> None:
        """Double buffering: copy chunk n while chunk n+1 is being filled."""
        prev: Optional[PinnedBuf] = None
        prev_ev: Optional[Event] = None
        for name, payload in chunks:
            cur = self.pool.checkout()  # clean: near miss, becomes prev and goes back a turn later or after the loop
            fill(cur, payload)
            ev = self.dev.copy_async(name, cur)
            if prev is not None:
                prev_ev.synchronize()
                self.pool.checkin(prev)
            prev, prev_ev = cur, ev
        if prev is not None:
            prev_ev.synchronize()
            self.pool.checkin(prev)

    def prefetch(self, t: HostTensor) -> None:
        if t.name in self._inflight:
            return
        buf = self.pool.checkout()  # clean: stored in _inflight under a free key, wait and drain give it back
        fill(buf, t.payload)
        self._inflight[t.name] = (buf, self.dev.copy_async(t.name, buf))

    def wait(self, name: str) -> None:
        entry = self._inflight.pop(name, None)
        if entry is None:
            return
        buf, ev = entry
        ev.synchronize()
        self.pool.checkin(buf)

    def keep_warm(self, t: HostTensor) -> None:
        buf = self.pool.checkout()  # leak: refresh of a name that is warm already overwrites the entry and loses its buffer
        fill(buf, t.payload)
        self._warm[t.name] = buf

    def drain(self) -> None:
        for name in list(self._inflight):
            self.wait(name)
        while self._warm:
            _, buf = self._warm.popitem()
            self.pool.checkin(buf)
