"""Pinned host staging for optimizer-state offload.

Master weights and Adam moments live on the host.  During a step every tensor passes through one of a small
number of page-locked buffers, since pageable copies are synchronous and a page-locked copy of the whole state
does not fit on our nodes.
"""
from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Optional

import torch

log = logging.getLogger(__name__)


class StagingTimeout(RuntimeError):
    """No page-locked buffer became free in time."""


class PinnedBuffer:
    __slots__ = ("index", "nbytes", "storage", "generation")

    def __init__(self, index: int, nbytes: int, pin: bool) -> None:
        self.index = index
        self.nbytes = nbytes
        self.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        self.generation = 0

    def view_as(self, like: torch.Tensor) -> torch.Tensor:
        need = like.numel() * like.element_size()
        return self.storage[:need].view(like.dtype).view(like.shape)


class PinnedBufferPool:
    def __init__(self, count: int, nbytes: int, *, pin: bool = True) -> None:
        self._cv = threading.Condition()
        self._free = deque(PinnedBuffer(i, nbytes, pin) for i in range(count))
        self._out: Dict[int, PinnedBuffer] = {}
        self.capacity = count
        self.nbytes = nbytes
        self.waits = 0

    def acquire(self, timeout: Optional[float] = None) -> PinnedBuffer:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._cv:
            while not self._free:
                self.waits += 1
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise StagingTimeout(f"{len(self._out)}/{self.capacity} buffers out")
                self._cv.wait(left)
            buf = self._free.popleft()  # clean: recorded in _out and handed to the caller
            buf.generation += 1
            self._out[buf.index] = buf
            return buf

    def try_acquire(self) -> Optional[PinnedBuffer]:
        with self._cv:
            if not self._free:
                return None
            buf = self._free.popleft()  # clean: handed to the caller
            buf.generation += 1
            self._out[buf.index] = buf
        return buf

    def release(self, buf: PinnedBuffer) -> None:
        with self._cv:
            if self._out.pop(buf.index, None) is None:
                log.warning("buffer %d was not out", buf.index)
                return
            self._free.append(buf)
            self._cv.notify()

    def trim(self, keep: int) -> int:
        """Unpin idle buffers until only `keep` exist."""
        dropped = 0
        with self._cv:
            while self.capacity > keep and self._free:
                buf = self._free.pop()  # clean: near miss, the buffer is retired on purpose and capacity shrinks with it
                buf.storage = torch.empty(0, dtype=torch.uint8)
                self.capacity -= 1
                dropped += 1
        return dropped


@contextlib.contextmanager
def borrowed(pool: PinnedBufferPool, timeout: Optional[float] = None):
    buf = pool.acquire(timeout)  # clean: finally below
    try:
        yield buf
    finally:
        pool.release(buf)


class GroupWindow:
    """Host window on one parameter group for the length of a fused step."""

    def __init__(self, pool: PinnedBufferPool, numel: int, want_master: bool) -> None:
        self.pool = pool
        self.numel = numel
        self.param = pool.acquire()  # clean: close() gives it back and every window is closed
        self.master = pool.acquire() if want_master else None  # leak: close() only returns param, never master

    def close(self) -> None:
        if self.param is not None:
            self.pool.release(self.param)
        self.param = None
        self.master = None


@dataclass
class TransferJob:
    name: str
    buf: PinnedBuffer
    shape: torch.Size
    dtype: torch.dtype
    done: threading.Event = field(default_factory=threading.Event)
    error: Optional[BaseException] = None


@dataclass
class EngineStats:
    applied: int = 0
    dropped: int = 0
    missed: int = 0


class OffloadEngine:
    def __init__(self, pool: PinnedBufferPool, targets: Dict[str, torch.Tensor], *, timeout: float = 30.0) -> None:
        self.pool = pool
        self.targets = targets
        self.timeout = timeout
        self.stats = EngineStats()
        self._resident: Dict[str, PinnedBuffer] = {}
        self._jobs: "queue.Queue[Optional[TransferJob]]" = queue.Queue(maxsize=16)
        self._thread = threading.Thread(target=self._run, name="offload", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                target = self.targets[job.name]
                target.copy_(job.buf.view_as(target), non_blocking=False)
                self.stats.applied += 1
            except (KeyError, RuntimeError) as exc:
                job.error = exc
            finally:
                self.pool.release(job.buf)
                job.done.set()

    def submit_update(self, name: str, src: torch.Tensor) -> TransferJob:
        buf = self.pool.acquire()  # clean: near miss, the job carries it and _run releases it in its finally
        buf.view_as(src).copy_(src)
        job = TransferJob(name, buf, src.shape, src.dtype)
        self._jobs.put(job)
        return job

    def offer_update(self, name: str, src: torch.Tensor) -> bool:
        """Like submit_update, but never blocks the training thread."""
        buf = self.pool.try_acquire()  # leak: when the queue is full the handler returns with the buffer held
        if buf is None:
            self.stats.missed += 1
            return False
        buf.view_as(src).copy_(src)
        try:
            self._jobs.put_nowait(TransferJob(name, buf, src.shape, src.dtype))
        except queue.Full:
            self.stats.dropped += 1
            return False
        return True

    def evict(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        buf = self.pool.acquire(self.timeout)  # leak: evicting a name twice overwrites the first buffer in _resident
        buf.view_as(tensor).copy_(tensor, non_blocking=True)
        self._resident[name] = buf

    def restore(self, name: str, out: torch.Tensor) -> bool:
        buf = self._resident.pop(name, None)
        if buf is None:
            return False
        try:
            out.copy_(buf.view_as(out), non_blocking=False)
        finally:
            self.pool.release(buf)
        return True

    def spill_cold(self, states: Dict[str, torch.Tensor], budget: int) -> List[str]:
        spilled: List[str] = []
        for name, state in states.items():
            if len(spilled) >= budget or name in self._resident:
                continue
            buf = self.pool.try_acquire()  # leak: a state in a sparse layout is skipped after the buffer was taken
            if buf is None:
                break
            if state.layout is not torch.strided:
                log.debug("%s is %s, left on the device", name, state.layout)
                continue
            buf.view_as(state).copy_(state)
            self._resident[name] = buf
            spilled.append(name)
        return spilled

    def step_pair(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, beta1: float, beta2: float) -> None:
        first = self.pool.acquire(self.timeout)  # leak: the second acquire may raise StagingTimeout before the try is entered
        second = self.pool.acquire(self.timeout)  # clean: the finally covers it
        try:
            first.view_as(exp_avg).copy_(exp_avg).mul_(beta1)
            second.view_as(exp_avg_sq).copy_(exp_avg_sq).mul_(beta2)
            exp_avg.copy_(first.view_as(exp_avg))
            exp_avg_sq.copy_(second.view_as(exp_avg_sq))
        finally:
            self.pool.release(second)
            self.pool.release(first)

    def global_norm(self, tensors: Iterable[torch.Tensor]) -> float:
        held: List[PinnedBuffer] = []
        total = 0.0
        try:
            for t in tensors:
                held.append(self.pool.acquire(self.timeout))  # clean: near miss, a timeout in the middle still empties held
                total += float(held[-1].view_as(t).copy_(t).float().pow(2).sum())
                if len(held) > 2:
                    self.pool.release(held.pop(0))
        finally:
            for buf in held:
                self.pool.release(buf)
        return total ** 0.5

    def fused_step(self, params: List[torch.Tensor], lr: float, mixed: bool) -> None:
        for p in params:
            window = GroupWindow(self.pool, p.numel(), want_master=mixed)  # clean: closed in finally
            try:
                window.param.view_as(p).copy_(p)
                if window.master is not None:
                    window.master.view_as(p).copy_(p).add_(p.grad, alpha=-lr)
                    p.copy_(window.master.view_as(p))
            finally:
                window.close()

    def checksum(self, tensor: torch.Tensor) -> int:
        with borrowed(self.pool, self.timeout) as buf:  # clean: context manager
            return int(buf.view_as(tensor).copy_(tensor).view(torch.uint8).sum())

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        for name in list(self._resident):
            self.pool.release(self._resident.pop(name))
