"""Bucketed gradient reduction over pooled communication buffers."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Type
from types import TracebackType

import torch
import torch.distributed as dist


@dataclass
class CommBuffer:
    data: torch.Tensor
    used: int = 0


class CommBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self._free = [CommBuffer(torch.empty(numel)) for _ in range(count)]

    def reserve(self) -> Optional[CommBuffer]:
        if not self._free:
            return None
        buf = self._free.pop()
        buf.used = 0
        return buf

    def unreserve(self, buf: CommBuffer) -> None:
        self._free.append(buf)


@dataclass
class Bucket:
    buf: CommBuffer
    params: List[torch.nn.Parameter] = field(default_factory=list)
    work: Optional["dist.Work"] = None


class ReduceWindow:
    """Holds a buffer and the collective lock for one fused reduction."""

    def __init__(self, reducer: "GradReducer", dry_run: bool = False) -> None:
        self.reducer = reducer
        self.dry_run = dry_run
        self.buf: Optional[CommBuffer] = None

    def __enter__(self) -> "ReduceWindow":
        self.reducer.collective.acquire()  # clean: near miss, __exit__ releases it first thing
        self.buf = self.reducer.pool.reserve()  # leak: __exit__ returns early on a dry run with the buffer
        return self

    def __exit__(self, et: Optional[Type[BaseException]], ev: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.reducer.collective.release()
        if self.dry_run:
            return
        if self.buf is not None:
            self.reducer.pool.unreserve(self.buf)


class GradReducer:
    def __init__(self, pool: CommBufferPool, bucket_numel: int) -> None:
        self.pool = pool
        self.bucket_numel = bucket_numel
        self.collective = threading.Lock()
        self.current: Optional[Bucket] = None
        self.launched: List[Bucket] = []
        self.persistent: Dict[str, CommBuffer] = {}

    def _launch(self, bucket: Bucket) -> None:
        view = bucket.buf.data[:bucket.buf.used]
        bucket.work = dist.all_reduce(view, async_op=True)
        self.launched.append(bucket)

    def mark_ready(self, p: torch.nn.Parameter) -> bool:
        n = p.numel()
        if self.current is not None and self.current.buf.used + n > self.bucket_numel:
            self._launch(self.current)
            self.current = None
        if self.current is None:
            buf = self.pool.reserve()  # clean: near miss, the full bucket was launched, wait() unreserves, this one is current
            if buf is None:
                return False
            self.current = Bucket(buf)
        b = self.current
        b.buf.data[b.buf.used:b.buf.used + n].copy_(p.grad.flatten())
        b.buf.used += n
        b.params.append(p)
        return True

    def mark_large(self, p: torch.nn.Parameter) -> bool:
        buf = self.pool.reserve()  # clean: launched as a bucket of its own
        if buf is None:
            return False
        buf.data[:p.numel()].copy_(p.grad.flatten())
        buf.used = p.numel()
        self._launch(Bucket(buf, [p]))
        return True

    def wait(self) -> int:
        if self.current is not None:
            self._launch(self.current)
            self.current = None
        n = 0
        for bucket in self.launched:
            bucket.work.wait()
            offset = 0
            for p in bucket.params:
                p.grad.copy_(bucket.buf.data[offset:offset + p.numel()].view_as(p))
                offset += p.numel()
            self.pool.unreserve(bucket.buf)
            n += 1
        self.launched.clear()
        return n

    def new_bucket(self) -> bool:
        buf = self.pool.reserve()  # leak: replaces a current bucket that was never launched
        if buf is None:
            return False
        self.current = Bucket(buf)
        return True

    def reduce_now(self, t: torch.Tensor, dry_run: bool = False) -> torch.Tensor:
        with ReduceWindow(self, dry_run) as window:
            if window.buf is None or dry_run:
                return t
            flat = window.buf.data[:t.numel()]
            flat.copy_(t.flatten())
            dist.all_reduce(flat)
            return flat.clone().view_as(t)

    def broadcast(self, t: torch.Tensor, src: int) -> bool:
        if not self.collective.acquire(timeout=5.0):  # leak: the return for a missing buffer keeps the lock
            return False
        buf = self.pool.reserve()  # clean: unreserved behind the broadcast
        if buf is None:
            return False
        flat = buf.data[:t.numel()]
        flat.copy_(t.flatten())
        dist.broadcast(flat, src)
        t.copy_(flat.view_as(t))
        self.pool.unreserve(buf)
        self.collective.release()
        return True

    def barrier(self) -> bool:
        if not self.collective.acquire(timeout=5.0):  # clean: near miss, the finally releases on the handled error as well
            return False
        try:
            dist.barrier()
            return True
        except RuntimeError:
            return False
        finally:
            self.collective.release()

    def gather(self, parts: List[torch.Tensor]) -> Optional[torch.Tensor]:
        bufs: List[CommBuffer] = []
        for part in parts:
            buf = self.pool.reserve()  # leak: the break keeps the loop's buffers when fewer than parts were had
            if buf is None:
                break
            buf.data[:part.numel()].copy_(part.flatten())
            bufs.append(buf)
        if len(bufs) != len(parts):
            return None
        out = torch.cat([b.data[:p.numel()] for b, p in zip(bufs, parts)])
        for buf in bufs:
            self.pool.unreserve(buf)
        return out

    def scatter(self, parts: List[torch.Tensor]) -> int:
        bufs: List[CommBuffer] = []
        for part in parts:
            buf = self.pool.reserve()  # clean: near miss, the break only shortens the list that is unreserved below
            if buf is None:
                break
            buf.data[:part.numel()].copy_(part.flatten())
            bufs.append(buf)
        for buf in bufs:
            self.pool.unreserve(buf)
        return len(bufs)

    def get_persistent(self, name: str) -> Optional[CommBuffer]:
        if name not in self.persistent:
            buf = self.pool.reserve()  # clean: near miss, only when absent, kept by name until shutdown
            if buf is None:
                return None
            self.persistent[name] = buf
        return self.persistent[name]

    def shutdown(self) -> None:
        self.wait()
        for buf in self.persistent.values():
            self.pool.unreserve(buf)
        self.persistent.clear()
