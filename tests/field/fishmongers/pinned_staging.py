"""Pinned host memory for copies between the host and one GPU."""
from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

log = logging.getLogger(__name__)


class StagingFull(MemoryError):
    """The limit on pinned memory is reached."""


class NonFinite(ArithmeticError):
    pass


@dataclass(eq=False)
class Pinned:
    data: torch.Tensor
    size: int
    last_used: float = field(default_factory=time.monotonic)

    def view_as(self, like: torch.Tensor) -> torch.Tensor:
        return self.data[: like.nbytes].view(like.dtype).view(like.shape)


class PinnedPool:
    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._bins: dict[int, list[Pinned]] = defaultdict(list)
        self._pending: deque[tuple[torch.cuda.Event, Pinned]] = deque()
        self._lock = threading.RLock()

    def get(self, nbytes: int) -> Pinned:
        size = 1 << max(12, (nbytes - 1).bit_length())
        with self._lock:
            self._reclaim()
            if self._bins[size]:
                return self._bins[size].pop()  # clean: returned
            if self._bytes + size > self._limit:
                raise StagingFull(f"{size} bytes on top of {self._bytes}")
            self._bytes += size
        data = torch.empty(size, dtype=torch.uint8, pin_memory=True)  # clean: wrapped and returned
        return Pinned(data, size)

    def put(self, buf: Pinned) -> None:
        buf.last_used = time.monotonic()
        with self._lock:
            self._bins[buf.size].append(buf)

    def retire(self, buf: Pinned, event: torch.cuda.Event) -> None:
        """Like put(), once the copy behind the event is done."""
        with self._lock:
            self._pending.append((event, buf))

    def _reclaim(self) -> None:
        while self._pending:
            event, buf = self._pending.popleft()  # clean: near miss, appended again when not ready, else put into its bin
            if not event.query():
                self._pending.appendleft((event, buf))
                break
            self.put(buf)

    def trim(self, keep_bytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            for size, bin_ in self._bins.items():
                while bin_ and self._bytes > keep_bytes:
                    buf = bin_.pop()  # leak: a buffer used a moment ago is passed over, but is out of its bin now
                    if now - buf.last_used < 1.0:
                        continue
                    self._bytes -= size

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[Pinned]:
        buf = self.get(nbytes)  # clean: finally
        try:
            yield buf
        finally:
            self.put(buf)


class Copier:
    def __init__(self, pool: PinnedPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_device(self, src: torch.Tensor) -> torch.Tensor:
        buf = self._pool.get(src.nbytes)  # clean: near miss, retired with the event, comes back in _reclaim()
        staged = buf.view_as(src)
        staged.copy_(src)
        with torch.cuda.stream(self._stream):
            out = staged.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._pool.retire(buf, event)
        return out

    def to_host(self, src: torch.Tensor, check: bool = True) -> torch.Tensor:
        if not src.is_cuda:
            return src
        buf = self._pool.get(src.nbytes)  # leak: NonFinite is raised before the put
        staged = buf.view_as(src)
        staged.copy_(src, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        if check and not torch.isfinite(staged).all():
            raise NonFinite(f"{src.shape}")
        out = staged.clone()
        self._pool.put(buf)
        return out


class Prefetcher:
    """Stages one batch ahead of the one being trained on."""

    def __init__(self, pool: PinnedPool, batches: Iterable[torch.Tensor], device: torch.device) -> None:
        self._pool = pool
        self._batches = iter(batches)
        self._device = device
        self._ahead: tuple[Pinned, torch.Tensor] | None = None

    def _stage(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._ahead = None
            return
        buf = self._pool.get(batch.nbytes)  # leak: close() forgets the batch that is staged ahead
        staged = buf.view_as(batch)
        staged.copy_(batch)
        self._ahead = (buf, staged)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._stage()
        while self._ahead is not None:
            buf, staged = self._ahead
            out = staged.to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pool.retire(buf, event)
            self._stage()
            yield out

    def close(self) -> None:
        self._batches = iter(())
        self._ahead = None


class GradOffloader:
    """Accumulates gradients on the host, one buffer a parameter."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._bufs: dict[str, Pinned] = {}

    def hook(self, name: str, grad: torch.Tensor) -> None:
        buf = self._bufs.get(name)
        if buf is None:
            buf = self._bufs[name] = self._pool.get(grad.nbytes)  # clean: near miss, only where there is none, and step_done() puts all of them back
            buf.view_as(grad).zero_()
        buf.view_as(grad).add_(grad.cpu())

    def step_done(self) -> None:
        while self._bufs:
            _, buf = self._bufs.popitem()
            self._pool.put(buf)


class SharedPinned:
    """One staged tensor for several devices; the last release() gives it back."""

    def __init__(self, pool: PinnedPool, buf: Pinned, users: int) -> None:
        self._pool, self._buf, self._users = pool, buf, users
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._pool.put(self._buf)


def broadcast(pool: PinnedPool, src: torch.Tensor, devices: list[torch.device], workers: ThreadPoolExecutor) -> list[Any]:
    if not devices:
        return []
    buf = pool.get(src.nbytes)  # clean: near miss, counted down by every copy in SharedPinned
    staged = buf.view_as(src)
    staged.copy_(src)
    shared = SharedPinned(pool, buf, len(devices))

    def copy(device: torch.device) -> torch.Tensor:
        try:
            return staged.to(device)
        finally:
            shared.release()

    return [workers.submit(copy, d) for d in devices]


def load_pair(pool: PinnedPool, weights: str, scales: str, device: torch.device) -> list[torch.Tensor]:
    first = pool.get(os.path.getsize(weights))  # leak: the second get may raise StagingFull while the first is held
    second = pool.get(os.path.getsize(scales))  # clean: finally
    try:
        out = []
        for path, buf in ((weights, first), (scales, second)):
            size = os.path.getsize(path)
            with open(path, "rb") as fh:  # clean: context manager
                fh.readinto(buf.data.numpy()[:size])
            out.append(buf.data[:size].to(device))
        return out
    finally:
        pool.put(second)
        pool.put(first)


def spill(pool: PinnedPool, tensor: torch.Tensor, fd: int) -> bool:
    buf = pool.get(tensor.nbytes)  # leak: a full disk is reported to the caller without the put
    buf.view_as(tensor).copy_(tensor)
    try:
        os.write(fd, buf.data.numpy()[: tensor.nbytes])
    except OSError as exc:
        log.error("cannot spill %d bytes: %s", tensor.nbytes, exc)
        return False
    pool.put(buf)
    return True


def spill_later(pool: PinnedPool, tensor: torch.Tensor, fd: int, workers: ThreadPoolExecutor) -> None:
    buf = pool.get(tensor.nbytes)  # clean: near miss, the done callback runs for success and failure
    buf.view_as(tensor).copy_(tensor)
    future = workers.submit(os.write, fd, buf.data.numpy()[: tensor.nbytes])
    future.add_done_callback(lambda _: pool.put(buf))


def checksum(pool: PinnedPool, tensor: torch.Tensor) -> int:
    with pool.lend(tensor.nbytes) as buf:  # clean: context manager
        buf.view_as(tensor).copy_(tensor)
        return hash(buf.data.numpy()[: tensor.nbytes].tobytes())
