"""Frame buffers for video fine-tuning data. Decoders are not thread safe, hence the leases."""

import logging
import threading
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch

logger = logging.getLogger(__name__)

FrameFn = Callable[[int], Optional[torch.Tensor]]


@dataclass
class FrameBuffer:
    data: torch.Tensor
    bucket: int


class FrameBufferPool:
    BUCKETS = (8, 16, 32, 64)

    def __init__(self, per_bucket: int, frame_shape: Tuple[int, int, int]) -> None:
        self._lock = threading.Lock()
        self._stacks = {
            b: [FrameBuffer(torch.empty(b, *frame_shape), b) for _ in range(per_bucket)] for b in self.BUCKETS
        }

    def rent_frames(self, n: int) -> Optional[FrameBuffer]:
        with self._lock:
            for b in self.BUCKETS:
                if b >= n and self._stacks[b]:
                    return self._stacks[b].pop()
        return None

    def unrent_frames(self, fb: FrameBuffer) -> None:
        with self._lock:
            self._stacks[fb.bucket].append(fb)


class ClipReader:
    def __init__(self, pool: FrameBufferPool, decode: FrameFn, use_pool: bool = True) -> None:
        self.pool = pool
        self.decode = decode
        self.use_pool = use_pool
        self._decoder_lock = threading.Lock()

    def read(self, start: int, n: int) -> Optional[torch.Tensor]:
        fb = self.pool.rent_frames(n)  # leak: a missing frame returns None with the buffer rented
        if fb is None:
            return None
        for i in range(n):
            frame = self.decode(start + i)
            if frame is None:
                logger.debug("missing frame %d", start + i)
                return None
            fb.data[i].copy_(frame)
        clip = fb.data[:n].clone()
        self.pool.unrent_frames(fb)
        return clip

    def read_padded(self, start: int, n: int) -> Optional[torch.Tensor]:
        fb = self.pool.rent_frames(n)  # clean: near miss, a missing frame only ends the loop
        if fb is None:
            return None
        last = 0
        for i in range(n):
            frame = self.decode(start + i)
            if frame is None:
                break
            fb.data[i].copy_(frame)
            last = i
        fb.data[last + 1 : n].copy_(fb.data[last])
        clip = fb.data[:n].clone()
        self.pool.unrent_frames(fb)
        return clip

    def read_locked(self, start: int, n: int) -> List[torch.Tensor]:
        self._decoder_lock.acquire()  # leak: the return from inside the loop keeps the decoder locked
        out = []
        for i in range(n):
            frame = self.decode(start + i)
            if frame is None:
                return out
            out.append(frame)
        self._decoder_lock.release()
        return out

    def read_locked_ok(self, start: int, n: int) -> List[torch.Tensor]:
        self._decoder_lock.acquire()  # clean: near miss, finally releases at either return
        try:
            out = []
            for i in range(n):
                frame = self.decode(start + i)
                if frame is None:
                    return out
                out.append(frame)
            return out
        finally:
            self._decoder_lock.release()

    def mean_frame(self, start: int, n: int) -> torch.Tensor:
        if self.use_pool:
            fb = self.pool.rent_frames(n)  # clean: near miss, rented and given up under the same switch
            dst = fb.data
        else:
            dst = torch.empty(n, 3, 32, 32)
        for i in range(n):
            dst[i].copy_(self.decode(start + i))
        mean = dst[:n].mean(0)
        if self.use_pool:
            self.pool.unrent_frames(fb)
        return mean

    def diff(self, start: int, n: int) -> Optional[torch.Tensor]:
        a = self.pool.rent_frames(n)  # clean: handed back in every case
        b = self.pool.rent_frames(n)  # leak: kept when a was not available
        if a is None:
            return None
        if b is None:
            self.pool.unrent_frames(a)
            return None
        for i in range(n):
            a.data[i].copy_(self.decode(start + i))
            b.data[i].copy_(self.decode(start + n + i))
        d = (a.data[:n] - b.data[:n]).abs()
        self.pool.unrent_frames(a)
        self.pool.unrent_frames(b)
        return d

    def windows(self, total: int, n: int) -> Iterator[torch.Tensor]:
        fb = self.pool.rent_frames(n)  # leak: the generator's return at the first gap passes the unrent
        if fb is None:
            return
        for start in range(0, total, n):
            for i in range(n):
                frame = self.decode(start + i)
                if frame is None:
                    return
                fb.data[i].copy_(frame)
            yield fb.data[:n].clone()
        self.pool.unrent_frames(fb)


def longest(pool: FrameBufferPool, sizes: Sequence[int]) -> Optional[FrameBuffer]:
    best: Optional[FrameBuffer] = None
    for n in sizes:
        fb = pool.rent_frames(n)  # leak: a smaller buffer than the best is dropped, so is the best that is replaced
        if fb is None:
            continue
        if best is None or fb.bucket > best.bucket:
            best = fb
    return best


def capacity(pool: FrameBufferPool, sizes: Sequence[int]) -> int:
    fb = longest(pool, sizes)  # clean: the one that is returned is given up here
    if fb is None:
        return 0
    n = fb.data.shape[0]
    pool.unrent_frames(fb)
    return n
