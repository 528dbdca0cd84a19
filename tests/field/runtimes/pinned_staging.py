"""Pinned host staging for device-to-host copies."""
import threading
import zlib
from collections import deque

import torch


class PinnedPool:
    """Fixed number of equally sized pinned buffers."""

    def __init__(self, nbytes, count):
        self._nbytes = nbytes
        self._cond = threading.Condition()
        self._free = deque(
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)
        )
        self._out = {}

    def checkout(self, timeout=None):
        with self._cond:
            if not self._cond.wait_for(lambda: len(self._free) > 0, timeout):
                return None
            buf = self._free.popleft()  # clean: recorded as out and handed to the caller
            self._out[buf.data_ptr()] = buf
            return buf

    def try_checkout_pair(self):
        with self._cond:
            if len(self._free) < 2:
                return None
            first = self._free.popleft()  # clean: near miss, both are known to be there and go to the caller
            second = self._free.popleft()  # clean: handed to the caller
            self._out[first.data_ptr()] = first
            self._out[second.data_ptr()] = second
            return first, second

    def checkin(self, buf):
        with self._cond:
            if self._out.pop(buf.data_ptr(), None) is None:
                return
            self._free.append(buf)
            self._cond.notify()


class HostStager:
    def __init__(self, pool, stream):
        self._pool = pool
        self._stream = stream

    def to_host(self, t):
        buf = self._pool.checkout(timeout=1.0)  # clean: near miss, the early return holds nothing and finally covers the rest
        if buf is None:
            return t.cpu()
        try:
            view = buf[: t.nbytes].view(t.dtype).view(t.shape)
            with torch.cuda.stream(self._stream):
                view.copy_(t, non_blocking=True)
            self._stream.synchronize()
            return view.clone()
        finally:
            self._pool.checkin(buf)

    def to_host_many(self, tensors):
        out = []
        for t in tensors:
            buf = self._pool.checkout()  # leak: the continue for empty tensors skips the checkin
            if t.numel() == 0:
                out.append(torch.empty(t.shape, dtype=t.dtype))
                continue
            view = buf[: t.nbytes].view(t.dtype).view(t.shape)
            view.copy_(t)
            out.append(view.clone())
            self._pool.checkin(buf)
        return out

    def _stage(self, t):
        buf = self._pool.checkout()  # clean: returned to the caller
        buf[: t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
        return buf

    def checksum(self, t):
        staged = self._stage(t)[: t.nbytes].clone()  # leak: only the clone is kept, the staging buffer is dropped
        return zlib.crc32(staged.numpy())

    def snapshot(self, t):
        staged = self._stage(t)  # clean: checked in after the clone
        host = staged[: t.nbytes].clone()
        self._pool.checkin(staged)
        return host.view(t.dtype).view(t.shape)

    def compare(self, a, b):
        pair = self._pool.try_checkout_pair()  # clean: near miss, unpacked later and both halves checked in
        if pair is None:
            return torch.equal(a.cpu(), b.cpu())
        left, right = pair
        left[: a.nbytes].copy_(a.view(-1).view(torch.uint8))
        right[: b.nbytes].copy_(b.view(-1).view(torch.uint8))
        same = a.nbytes == b.nbytes and torch.equal(left[: a.nbytes], right[: b.nbytes])
        for buf in pair:
            self._pool.checkin(buf)
        return same

    def fingerprint(self, a, b):
        pair = self._pool.try_checkout_pair()  # leak: only the first of the pair is checked in
        if pair is None:
            return None
        buf, tmp = pair
        buf[: a.nbytes].copy_(a.view(-1).view(torch.uint8))
        tmp[: b.nbytes].copy_(b.view(-1).view(torch.uint8))
        crc = zlib.crc32(tmp[: b.nbytes].numpy(), zlib.crc32(buf[: a.nbytes].numpy()))
        self._pool.checkin(buf)
        return crc


class DoubleBuffer:
    """Front buffer is being read while the back buffer fills."""

    def __init__(self, pool):
        self._pool = pool
        self._front = pool.checkout()  # clean: close checks it in
        self._back = pool.checkout()  # clean: close checks it in
        self._dirty = False

    def swap(self):
        self._front, self._back = self._back, self._front
        self._dirty = False
        return self._front

    def fill(self, t):
        if self._dirty:
            self._back = self._pool.checkout()  # leak: replaces a back buffer that is still out
        self._back[: t.nbytes].copy_(t.view(-1).view(torch.uint8))
        self._dirty = True

    def renew_front(self):
        stale = self._front
        self._front = self._pool.checkout()  # clean: near miss, the old front was kept aside and is checked in next
        self._pool.checkin(stale)

    def close(self):
        for buf in (self._front, self._back):
            self._pool.checkin(buf)
        self._front = self._back = None


def mirror_by_shape(pool, tensors):
    held = {}
    for t in tensors:
        held[t.shape] = pool.checkout()  # leak: a second tensor of the same shape overwrites the entry of the first
        held[t.shape][: t.nbytes].copy_(t.view(-1).view(torch.uint8))
    sums = {shape: int(buf.sum()) for shape, buf in held.items()}
    for buf in held.values():
        pool.checkin(buf)
    return sums


def drain(stager, pool, tensors, verify):
    mirror = pool.checkout() if verify else None  # clean: near miss, same flag guards the checkin
    ok = True
    for t in tensors:
        host = stager.to_host(t)
        if verify:
            mirror[: t.nbytes].copy_(t.view(-1).view(torch.uint8))
            ok = ok and bool(torch.equal(mirror[: t.nbytes], host.view(-1).view(torch.uint8)))
    if verify:
        pool.checkin(mirror)
    return ok
