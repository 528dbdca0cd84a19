"""Pinned host staging for activation and optimizer state offload."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Iterator, Optional

import torch


@dataclass
class HostBuffer:
    data: torch.Tensor
    bucket: int

    def view(self, like: torch.Tensor) -> torch.Tensor:
        flat = self.data[: like.numel() * like.element_size()]
        return flat.view(like.dtype).view(like.shape)


class PinnedPool:
    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.used = 0
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._cv = threading.Condition()

    @staticmethod
    def _bucket(nbytes: int) -> int:
        return 1 << max(12, (nbytes - 1).bit_length())

    def try_take(self, nbytes: int) -> Optional[HostBuffer]:
        bucket = self._bucket(nbytes)
        with self._cv:
            if self._free[bucket]:
                return self._free[bucket].pop()
            if self.used + bucket > self.limit:
                return None
            self.used += bucket
        return HostBuffer(torch.empty(bucket, dtype=torch.uint8, pin_memory=True), bucket)

    def take(self, nbytes: int) -> HostBuffer:
        while True:
            buf = self.try_take(nbytes)  # clean: near miss, the loop only rebinds after None
            if buf is not None:
                return buf
            with self._cv:
                self._cv.wait(timeout=0.05)

    def give(self, buf: HostBuffer) -> None:
        with self._cv:
            self._free[buf.bucket].append(buf)
            self._cv.notify()

    @contextlib.contextmanager
    def borrowed(self, nbytes: int) -> Iterator[HostBuffer]:
        buf = self.take(nbytes)  # clean: near miss, finally gives it back around the yield
        try:
            yield buf
        finally:
            self.give(buf)


@dataclass
class PendingCopy:
    buf: HostBuffer
    event: torch.cuda.Event
    like: torch.Tensor


class ActivationOffloader:
    """Registered as saved-tensor hooks; pack() on forward, unpack() on backward."""

    def __init__(self, pool: PinnedPool, min_bytes: int = 1 << 16) -> None:
        self.pool = pool
        self.min_bytes = min_bytes
        self.stream = torch.cuda.Stream()
        self.pending: dict[int, PendingCopy] = {}
        self.scratch: Optional[HostBuffer] = None
        self._next = 0

    def pack(self, t: torch.Tensor) -> int | torch.Tensor:
        nbytes = t.numel() * t.element_size()
        buf = self.pool.try_take(nbytes)  # leak: small tensors return early after the buffer was taken
        if buf is None:
            return t
        if nbytes < self.min_bytes or not t.is_contiguous():
            return t
        event = torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            buf.view(t).copy_(t, non_blocking=True)
            event.record(self.stream)
        key, self._next = self._next, self._next + 1
        self.pending[key] = PendingCopy(buf, event, torch.empty_like(t, device="meta"))
        return key

    def unpack(self, key: int | torch.Tensor) -> torch.Tensor:
        if isinstance(key, torch.Tensor):
            return key
        entry = self.pending.pop(key)
        entry.event.synchronize()
        out = entry.buf.view(entry.like).to("cuda")
        self.pool.give(entry.buf)
        return out

    def scratch_for(self, nbytes: int) -> HostBuffer:
        if self.scratch is None or self.scratch.bucket < nbytes:
            self.scratch = self.pool.take(nbytes)  # leak: growing overwrites the smaller scratch buffer
        return self.scratch

    def reset(self) -> None:
        for entry in self.pending.values():
            entry.event.synchronize()
            self.pool.give(entry.buf)
        self.pending.clear()
        if self.scratch is not None:
            self.pool.give(self.scratch)
            self.scratch = None


class StateSwapper:
    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.resident: dict[str, HostBuffer] = {}

    def stash(self, name: str, state: torch.Tensor) -> None:
        buf = self.resident.get(name)
        if buf is None:
            buf = self.pool.take(state.nbytes)  # clean: near miss, stays in resident under its name until evict
            self.resident[name] = buf
        buf.view(state).copy_(state)

    def stash_pair(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Optional[tuple[HostBuffer, HostBuffer]]:
        first = self.pool.try_take(exp_avg.nbytes)  # leak: kept by nobody when the second one is refused
        if first is None:
            return None
        second = self.pool.try_take(exp_avg_sq.nbytes)  # clean: returned with the first
        if second is None:
            return None
        first.view(exp_avg).copy_(exp_avg)
        second.view(exp_avg_sq).copy_(exp_avg_sq)
        return first, second

    def checksum(self, tensors: list[torch.Tensor]) -> int:
        total = 0
        for t in tensors:
            if t.numel() == 0:
                continue
            with self.pool.borrowed(t.nbytes) as buf:  # clean: the context manager gives it back
                buf.view(t).copy_(t)
                total ^= int(buf.data[: t.nbytes].to(torch.int64).sum())
        return total

    def roundtrip(self, t: torch.Tensor, other: torch.device) -> torch.Tensor:
        buf = self.pool.take(t.nbytes)  # clean: near miss, both the copy and the handler end in finally
        try:
            buf.view(t).copy_(t)
            return buf.view(t).to(other)
        except torch.cuda.OutOfMemoryError:
            return t.cpu()
        finally:
            self.pool.give(buf)

    def snapshot(self, t: torch.Tensor) -> torch.Tensor:
        buf = self.pool.take(t.nbytes)  # leak: only a clone of the view goes out, the buffer is dropped
        buf.view(t).copy_(t)
        return buf.view(t).clone()

    def adam_step(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> bool:
        pair = self.stash_pair(exp_avg, exp_avg_sq)  # clean: both halves are given back below
        if pair is None:
            return False
        for buf in pair:
            self.pool.give(buf)
        return True

    def evict(self, name: str) -> None:
        buf = self.resident.pop(name, None)
        if buf is not None:
            self.pool.give(buf)
