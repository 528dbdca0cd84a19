"""Saved-tensor hooks that move activations to pooled host buffers between forward and backward."""
from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple


class HostBuffer:
    __slots__ = ("payload", "stamp")

    def __init__(self):
        self.payload: Any = None
        self.stamp = 0


class HostBufferPool:
    def __init__(self, n: int):
        self._shelf = [HostBuffer() for _ in range(n)]
        self._mu = threading.Lock()
        self.out = 0

    def get(self) -> Optional[HostBuffer]:
        self._mu.acquire()  # leak: the empty shelf returns None with the mutex held
        if not self._shelf:
            return None
        buf = self._shelf.pop()
        self.out += 1
        self._mu.release()
        return buf

    def put(self, buf: HostBuffer) -> None:
        buf.payload = None
        with self._mu:
            self._shelf.append(buf)
            self.out -= 1


class SavedTensorHooks:
    """``pack`` returns a ticket that autograd keeps, ``unpack`` gives the tensor back for it."""

    def __init__(self, pool: HostBufferPool, min_size: int = 2):
        self.pool = pool
        self.min_size = min_size
        self._tickets: Dict[int, HostBuffer] = {}
        self._next = 0

    def pack(self, tensor: List[float]) -> Tuple[bool, Any]:
        if len(tensor) < self.min_size:
            return False, tensor
        buf = self.pool.get()  # clean: near miss, filed under its ticket until unpack or reset
        if buf is None:
            return False, tensor
        buf.payload = list(tensor)
        self._next += 1
        self._tickets[self._next] = buf
        return True, self._next

    def unpack(self, packed: Tuple[bool, Any]) -> List[float]:
        offloaded, value = packed
        if not offloaded:
            return value
        buf = self._tickets.pop(value)
        out = buf.payload
        self.pool.put(buf)
        return out

    def reset(self) -> None:
        """A step that was abandoned never unpacks."""
        for buf in self._tickets.values():
            self.pool.put(buf)
        self._tickets.clear()


class QuantizedHooks:
    """As above with int8 payloads."""

    def __init__(self, pool: HostBufferPool):
        self.pool = pool
        self._tickets: Dict[int, Tuple[HostBuffer, float]] = {}

    def pack(self, tensor: List[float]) -> int:
        buf = self.pool.get()  # leak: unpack of an all-zero tensor returns before the put, its ticket already popped
        if buf is None:
            raise MemoryError("host buffers exhausted")
        scale = max((abs(v) for v in tensor), default=0.0)
        buf.payload = [round(v / scale * 127) if scale else 0 for v in tensor]
        self._tickets[id(buf)] = (buf, scale)
        return id(buf)

    def unpack(self, ticket: int) -> List[float]:
        buf, scale = self._tickets.pop(ticket)
        if scale == 0.0:
            return [0.0] * len(buf.payload)
        out = [q * scale / 127 for q in buf.payload]
        self.pool.put(buf)
        return out


@contextlib.contextmanager
def staged(pool: HostBufferPool, tensor: List[float]) -> Iterator[Optional[HostBuffer]]:
    buf = pool.get()  # clean: near miss, put in finally unless it is None
    try:
        if buf is not None:
            buf.payload = tensor
        yield buf
    finally:
        if buf is not None:
            pool.put(buf)


class CheckpointRegion:
    """Recomputes the region in backward; entering stores the input."""

    def __init__(self, pool: HostBufferPool, x: List[float]):
        self.pool = pool
        self.x = x
        self._buf: Optional[HostBuffer] = None

    def __enter__(self) -> "CheckpointRegion":
        self._buf = self.pool.get()  # leak: an overflow is swallowed by __exit__ before the put
        if self._buf is not None:
            self._buf.payload = self.x
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, OverflowError):
            self.x = [0.0] * len(self.x)
            return True
        if self._buf is not None:
            self.pool.put(self._buf)
            self._buf = None
        return False


def stream_back(pool: HostBufferPool, layers: List[List[float]], stop_at: Optional[int] = None) -> Iterator[HostBuffer]:
    """Yields filled buffers, last layer first; each belongs to the consumer, who puts it."""
    for i in reversed(range(len(layers))):
        buf = pool.get()  # leak: the stop layer's buffer is taken and the generator returns
        if buf is None or i == stop_at:
            return
        buf.payload = layers[i]
        yield buf


def stream_back_prefetch(pool: HostBufferPool, layers: List[List[float]]) -> Iterator[HostBuffer]:
    """One buffer ahead of the consumer; a yielded buffer is the consumer's."""
    ahead: Optional[HostBuffer] = None
    try:
        for layer in reversed(layers):
            buf = pool.get()  # clean: near miss, ahead is yielded or put in finally
            if buf is None:
                break
            buf.payload = layer
            ready, ahead = ahead, buf
            if ready is not None:
                yield ready
        if ahead is not None:
            ready, ahead = ahead, None
            yield ready
    finally:
        if ahead is not None:
            pool.put(ahead)


def sum_back(pool: HostBufferPool, layers: List[List[float]]) -> float:
    total = 0.0
    for buf in stream_back_prefetch(pool, layers):  # clean: each yielded buffer is put
        total += sum(buf.payload)
        pool.put(buf)
    return total


def peak_back(pool: HostBufferPool, layers: List[List[float]]) -> float:
    peak = 0.0
    for buf in stream_back(pool, layers):  # leak: a buffer that sets no new peak is not put
        top = max(buf.payload, default=0.0)
        if top <= peak:
            continue
        peak = top
        pool.put(buf)
    return peak


def recompute(pool: HostBufferPool, x: List[float], fn: Callable[[List[float]], List[float]]) -> List[float]:
    with staged(pool, x) as buf:  # clean: with statement
        return fn(x if buf is None else buf.payload)
