"""Optimizer-state offload: pinned host buffers, prefetch table and write-back."""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional

import torch


@dataclass
class PinnedBuffer:
    data: torch.Tensor
    bucket: int
    version: int = 0

    def view(self, like: torch.Tensor) -> torch.Tensor:
        return self.data[: like.numel()].view_as(like)


class PinnedPool:
    """Power-of-two buckets of page-locked memory under a byte cap."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap = cap_bytes
        self.used = 0
        self._buckets: Dict[int, List[PinnedBuffer]] = {}
        self._cond = threading.Condition()

    def borrow(self, numel: int) -> Optional[PinnedBuffer]:
        bucket = 1 << max(0, numel - 1).bit_length()
        with self._cond:
            spare = self._buckets.setdefault(bucket, [])
            if spare:
                return spare.pop()  # clean: returned to the caller
            if self.used + 4 * bucket > self.cap:
                return None
            self.used += 4 * bucket  # clean: the bytes belong to the buffer that is returned
        return PinnedBuffer(torch.empty(bucket, pin_memory=True), bucket)

    def restore(self, buffer: PinnedBuffer) -> None:
        with self._cond:
            self._buckets[buffer.bucket].append(buffer)
            self._cond.notify()


class Offloader:
    """Common staging and shutdown for all back ends."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self.staging: Optional[PinnedBuffer] = None

    def ensure_staging(self, numel: int) -> Optional[PinnedBuffer]:
        if self.staging is None:
            self.staging = self.pool.borrow(numel)  # clean: near miss, only filled when empty and restored in close
        return self.staging

    def grow_staging(self, numel: int) -> bool:
        if self.staging is not None and self.staging.bucket >= numel:
            return True
        bigger = self.pool.borrow(numel)  # leak: the smaller staging buffer still held is overwritten
        if bigger is None:
            return False
        self.staging = bigger
        return True

    def close(self) -> None:
        if self.staging is not None:
            self.pool.restore(self.staging)
            self.staging = None


class NvmeOffloader(Offloader):
    """Bounces through a second buffer so that reads overlap with casts."""

    def __init__(self, pool: PinnedPool, bounce_numel: int) -> None:
        super().__init__(pool)
        self.bounce = pool.borrow(bounce_numel)  # leak: the inherited close restores staging only

    def read(self, path: str, out: torch.Tensor) -> None:
        target = self.bounce
        if target is None:
            out.copy_(torch.load(path))
            return
        target.view(out).copy_(torch.load(path))
        out.copy_(target.view(out))


class HostOffloader(Offloader):
    """Keeps optimizer state in pinned memory, keyed by parameter id."""

    def __init__(self, pool: PinnedPool) -> None:
        super().__init__(pool)
        self.resident: Dict[int, PinnedBuffer] = {}
        self.inflight: Dict[int, "Future[PinnedBuffer]"] = {}
        self._io = ThreadPoolExecutor(max_workers=2)

    def evict(self, pid: int, state: torch.Tensor, version: int) -> bool:
        buffer = self.resident.get(pid)
        if buffer is None:
            buffer = self.pool.borrow(state.numel())  # clean: near miss, borrowed only when none is resident; close restores it
            if buffer is None:
                return False
            self.resident[pid] = buffer
        buffer.view(state).copy_(state)
        buffer.version = version
        return True

    def prefetch(self, pid: int, state: torch.Tensor) -> None:
        if pid in self.inflight:
            return
        buffer = self.pool.borrow(state.numel())  # leak: collect returns without a restore when the version is stale
        if buffer is None:
            return
        self.inflight[pid] = self._io.submit(self._fill, buffer, state)

    @staticmethod
    def _fill(buffer: PinnedBuffer, state: torch.Tensor) -> PinnedBuffer:
        buffer.view(state).copy_(state, non_blocking=True)
        return buffer

    def collect(self, pid: int, out: torch.Tensor, version: int) -> bool:
        future = self.inflight.pop(pid, None)
        if future is None:
            return False
        buffer = future.result()
        if buffer.version != version:
            return False
        out.copy_(buffer.view(out))
        self.pool.restore(buffer)
        return True

    def close(self) -> None:
        for future in self.inflight.values():
            self.pool.restore(future.result())
        self.inflight.clear()
        for pid in list(self.resident):
            self.pool.restore(self.resident.pop(pid))
        self._io.shutdown()
        super().close()


def snapshot(pool: PinnedPool, state: torch.Tensor) -> torch.Tensor:
    """A pageable host copy that went through pinned memory."""
    buffer = pool.borrow(state.numel())  # leak: the clone is returned and the buffer dropped
    if buffer is None:
        return state.cpu()
    return buffer.view(state).copy_(state).clone()


def flush_states(pool: PinnedPool, states: Iterable[torch.Tensor], path: str) -> int:
    """Write every state through one bounce buffer at a time."""
    written = 0
    for index, state in enumerate(states):
        buffer = pool.borrow(state.numel())  # clean: near miss, the small-state continue is inside a try whose finally restores
        if buffer is None:
            break
        try:
            if state.numel() < 2:
                continue
            buffer.view(state).copy_(state)
            torch.save(buffer.view(state), f"{path}/{index}.pt")
            written += 1
        finally:
            pool.restore(buffer)
    return written
