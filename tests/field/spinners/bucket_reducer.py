"""Gradient reducer: packs gradients into communication buffers and reduces them."""
from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Callable, Dict, List, Optional, Sequence


class CommBuffer:
    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.payload = bytearray(nbytes)
        self.fill = 0

    def pack(self, grads: Sequence[bytes]) -> None:
        for g in grads:
            self.payload[self.fill: self.fill + len(g)] = g
            self.fill += len(g)


class CommBufferAllocator:
    """Preregistered communication buffers, bounded by a semaphore."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers = [CommBuffer(i, nbytes) for i in range(count)]
        self._sem = threading.BoundedSemaphore(count)
        self._mutex = threading.Lock()

    def alloc(self, timeout: float = 30.0) -> CommBuffer:
        if not self._sem.acquire(timeout=timeout):  # clean: near miss, the permit goes with the buffer, free() returns both
            raise TimeoutError("no communication buffer became free")
        with self._mutex:
            buf = self._buffers.pop()
        buf.fill = 0
        return buf

    def try_alloc(self, nbytes: int) -> Optional[CommBuffer]:
        if not self._sem.acquire(blocking=False):  # leak: the permit is kept when the request is too large
            return None
        if nbytes > self.nbytes:
            return None
        with self._mutex:
            return self._buffers.pop()

    def free(self, buf: CommBuffer) -> None:
        with self._mutex:
            self._buffers.append(buf)
        self._sem.release()

    def idle(self) -> int:
        with self._mutex:
            return len(self._buffers)


class Work:
    """Handle of an asynchronous collective."""

    def __init__(self, buf: CommBuffer) -> None:
        self.buf = buf
        self.future: "Future[CommBuffer]" = Future()

    def complete(self, error: Optional[BaseException] = None) -> None:
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.buf)

    def wait(self) -> CommBuffer:
        return self.future.result()


Launch = Callable[[CommBuffer], Work]


class Reducer:
    def __init__(self, alloc: CommBufferAllocator, launch: Launch, bucket_cap: int) -> None:
        self._alloc = alloc
        self._launch = launch
        self._cap = bucket_cap
        self._inflight: List[Work] = []
        self._by_param: Dict[str, Work] = {}
        self._error: Optional[BaseException] = None
        self._sync = True

    def reduce_bucket(self, grads: Sequence[bytes]) -> bytes:
        buf = self._alloc.alloc()  # clean: freed in the finally
        try:
            buf.pack(grads)
            self._launch(buf).wait()
            return bytes(buf.payload[: buf.fill])
        finally:
            self._alloc.free(buf)

    def reduce_async(self, grads: Sequence[bytes]) -> Work:
        buf = self._alloc.alloc()  # clean: near miss, the done callback frees it in either outcome
        buf.pack(grads)
        work = self._launch(buf)
        work.future.add_done_callback(lambda _fut: self._alloc.free(buf))
        return work

    def reduce_with_hook(self, grads: Sequence[bytes], hook: Callable[[bytes], None]) -> Work:
        buf = self._alloc.alloc()  # leak: the callback returns before free when the collective failed
        buf.pack(grads)

        def _done(fut: "Future[CommBuffer]") -> None:
            err = fut.exception()
            if err is not None:
                self._error = err
                return
            hook(bytes(buf.payload[: buf.fill]))
            self._alloc.free(buf)

        work = self._launch(buf)
        work.future.add_done_callback(_done)
        return work

    def launch_bucket(self, grads: Sequence[bytes]) -> None:
        buf = self._alloc.alloc()  # clean: near miss, kept by the work in the inflight list, finalize() frees it
        buf.pack(grads)
        self._inflight.append(self._launch(buf))

    def finalize(self) -> List[bytes]:
        out: List[bytes] = []
        while self._inflight:
            work = self._inflight.pop(0)
            try:
                buf = work.wait()
                out.append(bytes(buf.payload[: buf.fill]))
            finally:
                self._alloc.free(work.buf)
        return out

    def launch_param(self, name: str, grad: bytes) -> None:
        buf = self._alloc.alloc()  # leak: collect_ready() deletes the entries of failed works without a free
        buf.pack([grad])
        self._by_param[name] = self._launch(buf)

    def collect_ready(self) -> Dict[str, bytes]:
        out: Dict[str, bytes] = {}
        for name in list(self._by_param):
            work = self._by_param[name]
            if not work.future.done():
                continue
            del self._by_param[name]
            if work.future.exception() is not None:
                self._error = work.future.exception()
                continue
            out[name] = bytes(work.buf.payload[: work.buf.fill])
            self._alloc.free(work.buf)
        return out

    def reduce_chunked(self, grads: Sequence[bytes]) -> int:
        """Split a large bucket over several buffers."""
        sent = 0
        buf = self._alloc.alloc()  # clean: near miss, launched and freed before the name gets another buffer
        for g in grads:
            if buf.fill + len(g) > self._cap:
                sent += self._flush(buf)
                buf = self._alloc.alloc()  # clean: flushed by a later turn or after the loop
            buf.pack([g])
        return sent + self._flush(buf)

    def _flush(self, buf: CommBuffer) -> int:
        try:
            self._launch(buf).wait()
            return buf.fill
        finally:
            self._alloc.free(buf)

    def reduce_or_skip(self, grads: Sequence[bytes]) -> Optional[bytes]:
        """Used by the straggler path: gives up when no buffer is at hand."""
        buf = self._alloc.try_alloc(sum(map(len, grads)))  # leak: a failed collective is logged and the buffer stays out
        if buf is None:
            return None
        buf.pack(grads)
        try:
            self._launch(buf).wait()
        except RuntimeError as exc:
            self._error = exc
            return None
        data = bytes(buf.payload[: buf.fill])
        self._alloc.free(buf)
        return data


def broadcast_params(alloc: CommBufferAllocator, params: Sequence[bytes], launch: Launch) -> List[bytes]:
    """Two buffers in turn: one is packed while the other is sent."""
    ping = alloc.alloc()  # clean: freed in the finally
    try:
        pong = alloc.alloc()  # clean: near miss, the inner finally frees it under whichever name it has
        try:
            out: List[bytes] = []
            for p in params:
                ping.fill = 0
                ping.pack([p])
                launch(ping).wait()
                out.append(bytes(ping.payload[: ping.fill]))
                ping, pong = pong, ping
            return out
        finally:
            alloc.free(pong)
    finally:
        alloc.free(ping)
