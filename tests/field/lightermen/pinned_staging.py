"""Page-locked staging buffers for host to device copies of pixel values."""
from __future__ import annotations

import contextlib
import threading
from typing import Dict, Iterator, List, Optional, Sequence

import torch

_ALIGN = 4096


class StagingBuffer:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.mem = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.event: Optional[torch.cuda.Event] = None

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for d in shape:
            count *= d
        return self.mem[: count * dtype.itemsize].view(dtype).view(*shape)


class StagingPool:
    """Buffers in power-of-two classes under a byte cap. checkin() makes a buffer free again."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.total = 0
        self._lock = threading.Lock()
        self._shelves: Dict[int, List[StagingBuffer]] = {}
        self._busy: Dict[int, StagingBuffer] = {}

    @staticmethod
    def _klass(nbytes: int) -> int:
        k = _ALIGN
        while k < nbytes:
            k <<= 1
        return k

    def checkout(self, nbytes: int) -> StagingBuffer:
        k = self._klass(nbytes)
        with self._lock:
            shelf = self._shelves.setdefault(k, [])
            if shelf:
                buf = shelf.pop()
            else:
                if self.total + k > self.cap:
                    raise MemoryError("staging cap reached")
                buf = StagingBuffer(k)
                self.total += k
            self._busy[id(buf)] = buf
            return buf

    def checkin(self, buf: StagingBuffer) -> None:
        with self._lock:
            self._busy.pop(id(buf))
            buf.event = None
            self._shelves[buf.nbytes].append(buf)

    @contextlib.contextmanager
    def borrowed(self, nbytes: int) -> Iterator[StagingBuffer]:
        buf = self.checkout(nbytes)  # clean: checked in by the finally
        try:
            yield buf
        finally:
            self.checkin(buf)

    def prewarm(self, sizes: Sequence[int]) -> int:
        """Creates buffers up front so that the first requests do not pay for page locking."""
        made = []
        for nbytes in sizes:
            made.append(self.checkout(nbytes))  # clean: near miss, all are checked in at the end
        for buf in made:
            self.checkin(buf)
        return len(made)

    def compact(self, keep_class: int) -> int:
        """Takes the buffers of one class, sorts them by address and shelves them again."""
        with self._lock:
            want = len(self._shelves.get(keep_class, []))
        taken = []
        for _ in range(want):
            taken.append(self.checkout(keep_class))  # leak: only those under half of the cap go back
        taken.sort(key=lambda b: b.mem.data_ptr())
        running = 0
        for buf in taken:
            running += buf.nbytes
            if running <= self.cap // 2:
                self.checkin(buf)
        return want


class GuardedBuffer:
    """Closes over a buffer that it was given; checks it in on leaving the block."""

    def __init__(self, pool: StagingPool, buf: StagingBuffer, stream: torch.cuda.Stream) -> None:
        self.pool = pool
        self.buf = buf
        self.stream = stream

    def __enter__(self) -> StagingBuffer:
        return self.buf

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.stream.synchronize()
        self.pool.checkin(self.buf)
        return False


class LazyGuard:
    """Like GuardedBuffer, for copies that may turn out to be empty."""

    def __init__(self, pool: StagingPool, buf: StagingBuffer) -> None:
        self.pool = pool
        self.buf = buf
        self.written = 0

    def __enter__(self) -> "LazyGuard":
        return self

    def write(self, src: torch.Tensor) -> None:
        flat = src.reshape(-1).view(torch.uint8)
        self.buf.mem[self.written : self.written + flat.numel()].copy_(flat)
        self.written += flat.numel()

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.written == 0:
            return False
        self.pool.checkin(self.buf)
        return False


def upload(pool: StagingPool, pixels: torch.Tensor, device: str) -> torch.Tensor:
    nbytes = pixels.numel() * pixels.element_size()
    with pool.borrowed(nbytes) as buf:  # clean: the manager checks it in
        host = buf.view(pixels.shape, pixels.dtype)
        host.copy_(pixels)
        out = host.to(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return out


def upload_on(pool: StagingPool, pixels: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    nbytes = pixels.numel() * pixels.element_size()
    with GuardedBuffer(pool, pool.checkout(nbytes), stream) as buf:  # clean: __exit__ checks it in
        host = buf.view(pixels.shape, pixels.dtype)
        host.copy_(pixels)
        with torch.cuda.stream(stream):
            return host.cuda(non_blocking=True)


def upload_crops(pool: StagingPool, crops: List[torch.Tensor], device: str) -> Optional[torch.Tensor]:
    total = sum(c.numel() * c.element_size() for c in crops)
    with LazyGuard(pool, pool.checkout(total)) as guard:  # leak: __exit__ returns early if unwritten
        for crop in crops:
            if crop.shape[-1] >= 14:
                guard.write(crop)
        if guard.written == 0:
            return None
        return guard.buf.mem[: guard.written].to(device)


def stage(pool: StagingPool, pixels: torch.Tensor) -> StagingBuffer:
    buf = pool.checkout(pixels.numel() * pixels.element_size())  # clean: handed to the caller
    buf.view(pixels.shape, pixels.dtype).copy_(pixels)
    return buf


def crc_of(pool: StagingPool, pixels: torch.Tensor) -> int:
    staged = stage(pool, pixels)  # leak: summed and dropped
    acc = int(staged.mem[: pixels.numel()].sum())
    return acc & 0xFFFFFFFF


def stage_grown(pool: StagingPool, parts: List[torch.Tensor]) -> StagingBuffer:
    """Concatenates parts of unknown total size, growing as needed. The caller checks it in."""
    buf = pool.checkout(_ALIGN)  # leak: when it has to grow, the smaller buffer is replaced and lost
    used = 0
    for part in parts:
        n = part.numel()
        if used + n > buf.nbytes:
            bigger = pool.checkout((used + n) * 2)  # leak: lost itself at the next growth
            bigger.mem[:used].copy_(buf.mem[:used])
            buf = bigger
        buf.mem[used : used + n].copy_(part.reshape(-1))
        used += n
    return buf


def stage_grown_checked(pool: StagingPool, parts: List[torch.Tensor]) -> StagingBuffer:
    buf = pool.checkout(_ALIGN)  # clean: checked in when outgrown, else handed to the caller
    used = 0
    for part in parts:
        n = part.numel()
        if used + n > buf.nbytes:
            small = buf
            buf = pool.checkout((used + n) * 2)  # clean: near miss, the smaller one is checked in via `small`
            buf.mem[:used].copy_(small.mem[:used])
            pool.checkin(small)
        buf.mem[used : used + n].copy_(part.reshape(-1))
        used += n
    return buf


class InflightCopies:
    """Buffers whose copies run on a side stream; reap() checks in those that are through."""

    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool
        self._inflight: List[StagingBuffer] = []
        self._by_tag: Dict[str, StagingBuffer] = {}

    def submit(self, pixels: torch.Tensor, dst: torch.Tensor) -> None:
        buf = stage(self.pool, pixels)  # clean: near miss, reap and drain check it in
        dst.copy_(buf.view(pixels.shape, pixels.dtype), non_blocking=True)
        buf.event = torch.cuda.Event()
        buf.event.record()
        self._inflight.append(buf)

    def submit_tagged(self, tag: str, pixels: torch.Tensor, dst: torch.Tensor) -> None:
        buf = stage(self.pool, pixels)  # leak: nothing ever takes it out of _by_tag to check it in
        dst.copy_(buf.view(pixels.shape, pixels.dtype), non_blocking=True)
        self._by_tag[tag] = buf

    def tag_ready(self, tag: str) -> bool:
        return tag in self._by_tag

    def forget_tag(self, tag: str) -> None:
        self._by_tag.pop(tag, None)

    def reap(self) -> int:
        still = []
        for buf in self._inflight:
            if buf.event is not None and not buf.event.query():
                still.append(buf)
            else:
                self.pool.checkin(buf)
        done = len(self._inflight) - len(still)
        self._inflight = still
        return done

    def drain(self) -> None:
        torch.cuda.synchronize()
        while self._inflight:
            self.pool.checkin(self._inflight.pop())
        self._by_tag.clear()
