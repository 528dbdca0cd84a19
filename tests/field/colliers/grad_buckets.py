"""Gradient bucketing with reusable comm buffers and async all-reduce."""
from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Optional

log = logging.getLogger("buckets")


class CommBuffer:
    __slots__ = ("data", "rc", "tag")

    def __init__(self, n: int) -> None:
        self.data = bytearray(n)
        self.rc = 0
        self.tag = ""


class CommBufferCache:
    def __init__(self, nbytes: int, depth: int) -> None:
        self.nbytes = nbytes
        self._idle = [CommBuffer(nbytes) for _ in range(depth)]
        self._mu = threading.Lock()

    def get(self) -> Optional[CommBuffer]:
        with self._mu:
            return self._idle.pop() if self._idle else None

    def get_or_make(self) -> CommBuffer:
        b = self.get()  # clean: returned to the caller
        if b is not None:
            return b
        log.debug("cache empty, growing")
        return CommBuffer(self.nbytes)

    def put(self, b: CommBuffer) -> None:
        b.tag = ""
        with self._mu:
            self._idle.append(b)

    def idle(self) -> int:
        return len(self._idle)


@dataclass
class Work:
    buf: CommBuffer
    cbs: list[Callable[["Work"], None]] = field(default_factory=list)
    finished: bool = False
    ok: bool = True

    def add_done_callback(self, fn: Callable[["Work"], None]) -> None:
        self.cbs.append(fn)

    def complete(self, ok: bool = True) -> None:
        self.finished, self.ok = True, ok
        for fn in self.cbs:
            fn(self)


class Reducer:
    def __init__(self, cache: CommBufferCache, world: int, overlap: bool = True) -> None:
        self.cache = cache
        self.world = world
        self.overlap = overlap
        self.pending: list[Work] = []
        self.current: Optional[CommBuffer] = None
        self.fill = 0
        self.by_param: dict[str, CommBuffer] = {}
        self.shared: dict[str, CommBuffer] = {}  # tied weights
        self.found_inf = False

    # ---- bucket filling ---------------------------------------------------
    def push(self, name: str, grad: bytes) -> None:
        n = len(grad)
        if n > self.cache.nbytes:
            self._reduce_big(grad)
            return
        if self.current is not None and self.fill + n > self.cache.nbytes:
            self.flush()
        if self.current is None:
            self.current = self.cache.get_or_make()  # clean: near miss, flush moves it into pending before it is rebound
            self.fill = 0
        self.current.data[self.fill:self.fill + n] = grad
        self.fill += n

    def flush(self) -> None:
        if self.current is None:
            return
        w = Work(self.current)
        self.current = None
        self.pending.append(w)
        if not self.overlap:
            w.complete()

    def wait_all(self) -> None:
        self.flush()
        for w in self.pending:
            if not w.finished:
                w.complete()
            self.cache.put(w.buf)
        self.pending.clear()

    def _reduce_big(self, grad: bytes) -> None:
        step = self.cache.nbytes
        for off in range(0, len(grad), step):
            buf = self.cache.get_or_make()  # leak: all-zero chunk continues without put
            chunk = grad[off:off + step]
            buf.data[:len(chunk)] = chunk
            if not any(chunk):
                continue
            self._allreduce(buf)
            self.cache.put(buf)

    def _allreduce(self, buf: CommBuffer) -> Work:
        w = Work(buf)
        w.complete()
        return w

    # ---- async paths ------------------------------------------------------
    def reduce_async(self, grad: bytes) -> Work:
        buf = self.cache.get_or_make()  # clean: the done callback puts it back
        buf.data[:len(grad)] = grad
        w = Work(buf)
        w.add_done_callback(self._on_done)
        return w

    def _on_done(self, w: Work) -> None:
        self.cache.put(w.buf)

    def reduce_checked(self, grad: bytes) -> Work:
        buf = self.cache.get_or_make()  # leak: the callback returns early when the work failed
        buf.data[:len(grad)] = grad
        w = Work(buf)
        w.add_done_callback(self._on_checked)
        return w

    def _on_checked(self, w: Work) -> None:
        if not w.ok:
            self.found_inf = True
            log.error("allreduce failed, step will be skipped")
            return
        self.cache.put(w.buf)

    def reduce_then(self, grad: bytes, then: Optional[Callable[[bytes], None]] = None) -> Work:
        buf = self.cache.get_or_make()  # clean: near miss, both callbacks end in put
        w = Work(buf)
        if then is None:
            w.add_done_callback(self._on_done)
        else:
            w.add_done_callback(partial(self._run_then, then))
        buf.data[:len(grad)] = grad
        return w

    def _run_then(self, then: Callable[[bytes], None], w: Work) -> None:
        try:
            then(bytes(w.buf.data))
        finally:
            self.cache.put(w.buf)

    def reduce_named(self, name: str, grad: bytes) -> None:
        buf = self.cache.get_or_make()  # leak: a parameter used twice overwrites its entry
        buf.tag = name
        buf.data[:len(grad)] = grad
        self.by_param[name] = buf

    def collect_named(self, shared: bool = False) -> dict[str, bytes]:
        out = {}
        table = self.shared if shared else self.by_param
        for name, buf in table.items():
            out[name] = bytes(buf.data)
            self.cache.put(buf)
        table.clear()
        return out

    def reduce_shared(self, name: str, grad: bytes) -> CommBuffer:
        buf = self.shared.get(name)
        if buf is None:
            buf = self.shared[name] = self.cache.get_or_make()  # clean: near miss, only taken when there is no entry, collect_named puts it
        for i, g in enumerate(grad):
            buf.data[i] ^= g
        return buf

    # ---- error feedback ---------------------------------------------------
    def _quantize(self, grad: bytes) -> CommBuffer:
        q = self.cache.get_or_make()  # clean: returned to the caller
        for i, g in enumerate(grad):
            q.data[i] = g >> 4
        return q

    def quant_error(self, grad: bytes) -> list[int]:
        q = self._quantize(grad)  # leak: only the list goes out, q is dropped
        return [g - (q.data[i] << 4) for i, g in enumerate(grad)]

    def send_quantized(self, grad: bytes, sink: "queue.Queue[CommBuffer]") -> None:
        q = self._quantize(grad)  # clean: queued, the sender thread puts it back
        sink.put(q)

    def hierarchical(self, grad: bytes, inter: bool) -> Optional[bytes]:
        intra = self.cache.get()  # leak: not put when the inter buffer is missing
        if intra is None:
            return None
        intra.data[:len(grad)] = grad
        if inter:
            cross = self.cache.get()  # clean: put right after use
            if cross is None:
                log.warning("no cross-node buffer, doing flat")
                return None
            cross.data[:] = intra.data
            self._allreduce(cross)
            intra.data[:] = cross.data
            self.cache.put(cross)
        res = bytes(intra.data[:len(grad)])
        self.cache.put(intra)
        return res


def sender(q: "queue.Queue[Optional[CommBuffer]]", cache: CommBufferCache, wire: list[bytes]) -> None:
    while True:
        b = q.get()
        if b is None:
            return
        try:
            wire.append(bytes(b.data[:4]))
        finally:
            cache.put(b)


if __name__ == "__main__":
    cache = CommBufferCache(64, 6)
    r = Reducer(cache, 2)
    for i in range(5):
        r.push(f"p{i}", bytes([i] * 40))
    r.wait_all()
    r.reduce_async(b"a").complete()
    r.reduce_then(b"a", lambda b: None).complete()
    q: "queue.Queue" = queue.Queue()
    r.send_quantized(b"abc", q)
    q.put(None)
    wire: list[bytes] = []
    sender(q, cache, wire)
    r.reduce_shared("w", b"ab")
    r.reduce_shared("w", b"ab")
    r.collect_named(shared=True)
    print(cache.idle(), r.hierarchical(b"zz", True), wire)
