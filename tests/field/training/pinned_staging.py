from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Iterator, List, Optional

import torch


@dataclass
class StagingOptions:
    n_buffers: int = 8
    nbytes: int = 1 << 20
    pin: bool = False
    use_pool: bool = True


@dataclass
class HostBuffer:
    data: torch.Tensor
    index: int
    in_use: bool = False


class PinnedPool:
    def __init__(self, opts: StagingOptions):
        self._cv = threading.Condition()
        self._bufs: List[HostBuffer] = [
            HostBuffer(torch.empty(opts.nbytes, dtype=torch.uint8, pin_memory=opts.pin), i)
            for i in range(opts.n_buffers)
        ]

    def get_buffer(self, block: bool = True) -> Optional[HostBuffer]:
        with self._cv:
            while True:
                for b in self._bufs:
                    if not b.in_use:
                        b.in_use = True
                        return b
                if not block:
                    return None
                self._cv.wait()

    def return_buffer(self, buf: HostBuffer) -> None:
        with self._cv:
            buf.in_use = False
            self._cv.notify()

    @contextlib.contextmanager
    def leased(self) -> Iterator[HostBuffer]:
        buf = self.get_buffer()  # clean: the generator's finally returns it
        try:
            yield buf
        finally:
            self.return_buffer(buf)

    @contextlib.contextmanager
    def leased_if_idle(self) -> Iterator[Optional[HostBuffer]]:
        buf = self.get_buffer(block=False)  # clean: near miss, only None skips the return
        try:
            yield buf
        finally:
            if buf is not None:
                self.return_buffer(buf)


class HostStager:
    def __init__(self, opts: StagingOptions):
        self.opts = opts
        self.pool = PinnedPool(opts) if opts.use_pool else None

    def to_device(self, src: torch.Tensor, device: torch.device) -> torch.Tensor:
        buf = None
        if self.pool is not None:
            buf = self.pool.get_buffer()  # clean: near miss, the same guard decides on the return
            n = src.numel() * src.element_size()
            host = buf.data[:n].view(src.dtype).view_as(src)
            host.copy_(src)
        else:
            host = src
        out = host.to(device, non_blocking=False)
        if self.pool is not None:
            self.pool.return_buffer(buf)
        return out

    def to_host(self, src: torch.Tensor) -> torch.Tensor:
        if self.opts.use_pool:
            buf = self.pool.get_buffer()  # leak: a CPU source returns before the buffer goes back
            if src.device.type == "cpu":
                return src
            n = src.numel() * src.element_size()
            host = buf.data[:n].view(src.dtype).view_as(src)
            host.copy_(src)
            out = host.clone()
            self.pool.return_buffer(buf)
            return out
        return src.cpu()

    def checksum(self, src: torch.Tensor, strict: bool) -> int:
        buf = self.pool.get_buffer()  # leak: only returned when strict is set
        n = src.numel() * src.element_size()
        buf.data[:n].copy_(src.contiguous().view(torch.uint8).view(-1))
        total = int(buf.data[:n].sum())
        if strict:
            self.pool.return_buffer(buf)
        return total

    def peek(self) -> int:
        return self.pool.get_buffer().data.numel()  # leak: the buffer itself is dropped, only its size survives

    def mean_chunks(self, chunks: List[torch.Tensor]) -> List[float]:
        res = []
        for c in chunks:
            with self.pool.leased() as buf:  # clean: context manager
                if c.numel() == 0:
                    continue
                view = buf.data[: c.numel() * c.element_size()].view(c.dtype)
                view.copy_(c.view(-1))
                res.append(float(view.float().mean()))
        return res

    def try_mean(self, c: torch.Tensor) -> Optional[float]:
        with self.pool.leased_if_idle() as buf:  # clean: near miss, the early return inside still runs the exit
            if buf is None:
                return None
            view = buf.data[: c.numel() * c.element_size()].view(c.dtype)
            view.copy_(c.view(-1))
            return float(view.float().mean())


@dataclass
class TransferBatch:
    stager: HostStager
    bufs: List[HostBuffer] = field(default_factory=list)

    def grab(self, n: int) -> bool:
        for _ in range(n):
            b = self.stager.pool.get_buffer(block=False)  # clean: near miss, the partial set is rolled back by done()
            if b is None:
                self.done()
                return False
            self.bufs.append(b)
        return True

    def done(self) -> None:
        while self.bufs:
            self.stager.pool.return_buffer(self.bufs.pop())


def grab_many(pool: PinnedPool, n: int) -> Optional[List[HostBuffer]]:
    got: List[HostBuffer] = []
    for _ in range(n):
        b = pool.get_buffer(block=False)  # leak: those taken so far are lost when the pool runs out
        if b is None:
            return None
        got.append(b)
    return got


def copy_pair(pool: PinnedPool, a: torch.Tensor, b: torch.Tensor) -> Optional[torch.Tensor]:
    bufs = grab_many(pool, 2)  # leak: only the first of the two is returned
    if bufs is None:
        return None
    bufs[0].data[: a.numel()].copy_(a)
    bufs[1].data[: b.numel()].copy_(b)
    out = torch.cat([bufs[0].data[: a.numel()], bufs[1].data[: b.numel()]])
    pool.return_buffer(bufs[0])
    return out


def run_batch(batch: TransferBatch, srcs: List[torch.Tensor]) -> bool:
    if not batch.grab(len(srcs)):
        return False
    try:
        for buf, s in zip(batch.bufs, srcs):
            buf.data[: s.numel()].copy_(s)
    finally:
        batch.done()
    return True
