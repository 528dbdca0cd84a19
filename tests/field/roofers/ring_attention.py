"""Host driver for ring attention over a sequence-parallel group."""
from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any, Callable, Optional, Sequence

try:
    import torch
except ImportError:  # CPU-only CI image
    torch = None

log = logging.getLogger(__name__)


class HostBuffer:
    """Stand-in for a tensor when torch is not installed."""

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.data: list = []

    def copy_(self, other: "HostBuffer") -> "HostBuffer":
        self.data = list(other.data)
        return self

    def clone(self) -> "HostBuffer":
        return HostBuffer(self.shape, self.dtype).copy_(self)


def _empty(shape: Sequence[int], dtype: Any, device: str):
    if torch is None:
        return HostBuffer(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class CommBufferPool:
    """Send/receive buffers registered with the transport; expensive to create."""

    def __init__(self, device: str, limit: int = 16) -> None:
        self.device = device
        self.limit = limit
        self._free: dict[tuple, list] = defaultdict(list)
        self._outstanding = 0

    def acquire(self, shape: Sequence[int], dtype: Any):
        bucket = self._free[(tuple(shape), dtype)]
        self._outstanding += 1
        if bucket:
            return bucket.pop()
        return _empty(shape, dtype, self.device)

    def try_acquire(self, shape: Sequence[int], dtype: Any):
        if self._outstanding >= self.limit:
            return None
        return self.acquire(shape, dtype)  # clean: handed to the caller

    def release(self, buf) -> None:
        self._free[(tuple(buf.shape), buf.dtype)].append(buf)
        self._outstanding -= 1


class ZigzagChannel:
    """Head and tail halves of the zigzag schedule, swapped at each hop."""

    def __init__(self, pool: CommBufferPool, head, tail) -> None:
        self.pool = pool
        self.head = head
        self.tail = tail

    def flip(self) -> None:
        self.head, self.tail = self.tail, self.head

    def close(self) -> None:
        self.pool.release(self.head)
        self.pool.release(self.tail)


class RingAttention:
    def __init__(self, pool: CommBufferPool, group, kernel: Callable, kernel_bwd: Callable) -> None:
        self.pool = pool
        self.group = group
        self.kernel = kernel
        self.kernel_bwd = kernel_bwd

    @staticmethod
    def _kv_shape(k) -> tuple[int, ...]:
        return (2, *k.shape)

    def _pack(self, buf, k, v) -> None:
        if torch is None:
            buf.data = [k, v]
            return
        buf[0].copy_(k)
        buf[1].copy_(v)

    def forward(self, q, k, v):
        shape = self._kv_shape(k)
        world = self.group.world
        cur = self.pool.acquire(shape, k.dtype)  # clean: released at the hop or after the last one
        self._pack(cur, k, v)
        out = None
        for step in range(world):
            last = step == world - 1
            nxt = None if last else self.pool.acquire(shape, k.dtype)  # clean: near miss, becomes cur after the old cur is released
            work = None if last else self.group.exchange(cur, nxt)
            out = self.kernel(q, cur, out)
            if work is not None:
                work.wait()
            if not last:
                self.pool.release(cur)
                cur = nxt
        self.pool.release(cur)
        return out

    def forward_striped(self, q, k, v, causal: bool = True):
        """All hops exchange the local shard; masked hops do no math."""
        shape = self._kv_shape(k)
        local = self.pool.acquire(shape, k.dtype)  # clean: released after the loop
        self._pack(local, k, v)
        out = None
        for step in range(self.group.world):
            src = (self.group.rank - step) % self.group.world
            recv = self.pool.acquire(shape, k.dtype)  # leak: a masked hop continues past the release
            self.group.exchange(local, recv).wait()
            if causal and src > self.group.rank:
                continue
            out = self.kernel(q, recv, out)
            self.pool.release(recv)
        self.pool.release(local)
        return out

    def backward(self, q, k, v, dout):
        shape = self._kv_shape(k)
        kv = self.pool.acquire(shape, k.dtype)  # clean: released in finally
        dkv = self.pool.acquire(shape, k.dtype)  # leak: rebound to the incoming gradient at the first hop
        try:
            self._pack(kv, k, v)
            for _ in range(self.group.world):
                incoming = self.pool.acquire(shape, k.dtype)  # leak: the next hop rebinds dkv, only the last one is released
                self.group.exchange(dkv, incoming).wait()
                self.kernel_bwd(q, kv, dout, incoming)
                dkv = incoming
            grads = dkv.clone()
        finally:
            self.pool.release(kv)
            self.pool.release(dkv)
        return grads

    def _gather_kv(self, k, v):
        full = self.pool.acquire((self.group.world, *self._kv_shape(k)), k.dtype)  # clean: returned to the caller
        self.group.all_gather(full, k, v)
        return full

    def snapshot_kv(self, k, v):
        """Private copy of the whole sequence's KV for the debugger."""
        full = self._gather_kv(k, v)  # leak: cloned and dropped
        return full.clone()

    def kv_norms(self, k, v, reduce: Callable):
        full = self._gather_kv(k, v)  # clean: released in finally
        try:
            return reduce(full)
        finally:
            self.pool.release(full)

    def open_channel(self, shape: Sequence[int], dtype: Any) -> Optional[ZigzagChannel]:
        head = self.pool.try_acquire(shape, dtype)  # leak: kept when the tail cannot be had
        if head is None:
            return None
        tail = self.pool.try_acquire(shape, dtype)  # clean: moved into the channel
        if tail is None:
            log.warning("no tail buffer, zigzag disabled for this step")
            return None
        return ZigzagChannel(self.pool, head, tail)

    def forward_zigzag(self, q, k, v):
        chan = self.open_channel(self._kv_shape(k), k.dtype)  # clean: closed in finally, None checked
        if chan is None:
            return self.forward(q, k, v)
        try:
            self._pack(chan.head, k, v)
            out = None
            for _ in range(self.group.world):
                out = self.kernel(q, chan.head, out)
                self.group.exchange(chan.head, chan.tail).wait()
                chan.flip()
            return out
        finally:
            chan.close()
