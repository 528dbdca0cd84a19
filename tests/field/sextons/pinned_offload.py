from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch


class PinnedPool:
    """Page-locked host buffers by power-of-two size."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.allocated = 0
        self._bins: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._cv = threading.Condition()

    @staticmethod
    def _bin(n: int) -> int:
        return 1 << max(12, (n - 1).bit_length())

    def get(self, nbytes: int) -> torch.Tensor | None:
        size = self._bin(nbytes)
        with self._cv:
            if self._bins[size]:
                return self._bins[size].pop()
            if self.allocated + size > self.limit:
                return None
            self.allocated += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, buf: torch.Tensor) -> None:
        with self._cv:
            self._bins[buf.numel()].append(buf)
            self._cv.notify()


class StreamPool:
    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)
        self._streams = deque(torch.cuda.Stream() for _ in range(n))

    def lease(self, block: bool = True) -> torch.cuda.Stream | None:
        if not self._sem.acquire(blocking=block):  # clean: near miss, matched by the release in unlease
            return None
        return self._streams.popleft()

    def unlease(self, s: torch.cuda.Stream) -> None:
        self._streams.append(s)
        self._sem.release()


@dataclass
class Parked:
    buf: torch.Tensor
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype
    event: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Offloader:
    def __init__(self, pool: PinnedPool, streams: StreamPool) -> None:
        self.pool = pool
        self.streams = streams
        self.parked: dict[str, Parked] = {}
        self._grads: dict[str, Parked] = {}

    def _to_host(self, t: torch.Tensor, s: torch.cuda.Stream) -> Parked | None:
        nbytes = t.numel() * t.element_size()
        buf = self.pool.get(nbytes)  # clean: near miss, leaves inside the Parked
        if buf is None:
            return None
        out = Parked(buf, nbytes, t.shape, t.dtype)
        with torch.cuda.stream(s):
            buf[:nbytes].view(t.dtype).view(t.shape).copy_(t, non_blocking=True)
            out.event.record(s)
        return out

    def park(self, name: str, t: torch.Tensor) -> bool:
        s = self.streams.lease(block=False)  # leak: without a host buffer the stream is not given back
        if s is None:
            return False
        old = self.parked.pop(name, None)
        if old is not None:
            self.pool.put(old.buf)
        entry = self._to_host(t, s)  # clean: near miss, the former entry of that name was put back first
        if entry is None:
            return False
        self.parked[name] = entry
        self.streams.unlease(s)
        return True

    def park_grad(self, name: str, g: torch.Tensor) -> bool:
        s = self.streams.lease()  # clean: near miss, given back in the finally
        if s is None:
            return False
        try:
            entry = self._to_host(g, s)  # leak: the gradients kept here are cleared by drop_all without put
            if entry is None:
                return False
            self._grads.setdefault(name, entry)
        finally:
            self.streams.unlease(s)
        return True

    def restore(self, name: str, dst: torch.Tensor) -> bool:
        entry = self.parked.pop(name, None)
        if entry is None:
            return False
        entry.event.synchronize()
        dst.copy_(entry.buf[: entry.nbytes].view(entry.dtype).view(entry.shape))
        self.pool.put(entry.buf)
        return True

    def park_many(self, named: dict[str, torch.Tensor]) -> bool:
        s = self.streams.lease()  # clean: near miss, unleased on failure and at the end
        if s is None:
            return False
        made: dict[str, Parked] = {}
        for name, t in named.items():
            if name in self.parked:
                continue
            entry = self._to_host(t, s)  # clean: near miss, the ones made are put back before False
            if entry is None:
                s.synchronize()
                for done in made.values():
                    self.pool.put(done.buf)
                self.streams.unlease(s)
                return False
            made[name] = entry
        self.parked.update(made)
        self.streams.unlease(s)
        return True

    def drop_all(self) -> None:
        for entry in self.parked.values():
            entry.event.synchronize()
            self.pool.put(entry.buf)
        self.parked.clear()
        self._grads.clear()


def round_trip(pool: PinnedPool, t: torch.Tensor) -> torch.Tensor | None:
    n = t.numel() * t.element_size()
    src = pool.get(n)  # leak: stays out when the second buffer cannot be had
    if src is None:
        return None
    dst = pool.get(n)  # clean: near miss, put back with src at the end
    if dst is None:
        return None
    src[:n].view(t.dtype).view(t.shape).copy_(t)
    dst[:n].copy_(src[:n])
    out = dst[:n].view(t.dtype).view(t.shape).cuda()
    pool.put(src)
    pool.put(dst)
    return out


def bandwidth(pool: PinnedPool, sizes: list[int], device: str = "cuda") -> dict[int, float]:
    result: dict[int, float] = {}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for n in sizes:
        buf = pool.get(n)  # leak: a measurement of zero time continues past the put
        if buf is None:
            continue
        start.record()
        buf.to(device, non_blocking=True)
        stop.record()
        stop.synchronize()
        ms = start.elapsed_time(stop)
        if ms <= 0:
            continue
        result[n] = buf.numel() / ms / 1e6
        pool.put(buf)
    return result
