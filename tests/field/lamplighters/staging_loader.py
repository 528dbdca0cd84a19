"""Host-to-device staging for the tokenised shard loader.

Every copy to the device goes through a pinned buffer that comes from a fixed
:class:`StagingPool`.  Pinning is slow, so buffers are allocated once at start
and circulate for the lifetime of the worker.
"""
from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Callable, Deque, Dict, Iterator, List, Optional, Sequence

import numpy as np
import torch

log = logging.getLogger("loader.staging")


class StagingExhausted(RuntimeError):
    """No pinned buffer became free before the deadline."""


class CorruptShard(ValueError):
    """The shard header does not match its payload."""


class StagingPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._nbytes = nbytes
        self._free: List[torch.Tensor] = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for _ in range(count)
        ]

    def checkout(self, timeout: float = 5.0) -> torch.Tensor:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                raise StagingExhausted(f"no staging buffer within {timeout}s")
            return self._free.pop()  # clean: handed straight to the caller

    def try_checkout(self) -> Optional[torch.Tensor]:
        with self._cond:
            if not self._free:
                return None
            buf = self._free.pop()  # clean: returned, the caller owns it
        buf.zero_()
        return buf

    def checkout_at_least(self, nbytes: int) -> Optional[torch.Tensor]:
        """A buffer whose capacity covers ``nbytes``; ``None`` if there is none."""
        with self._cond:
            for _ in range(len(self._free)):
                cand = self._free.pop(0)  # clean: returned, or appended again before the next turn
                if cand.numel() >= nbytes:
                    return cand
                self._free.append(cand)
            return None

    def checkout_aligned(self, alignment: int) -> Optional[torch.Tensor]:
        with self._cond:
            while self._free:
                cand = self._free.pop()  # leak: a misaligned buffer is dropped when the loop takes the next
                if cand.data_ptr() % alignment == 0:
                    return cand
                log.debug("buffer %x is not %d-aligned", cand.data_ptr(), alignment)
            return None

    def checkin(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


@dataclass
class Shard:
    name: str
    payload: np.ndarray
    expected: int
    compressed: bool = False


@dataclass
class InFlight:
    shard: Shard
    host: Optional[torch.Tensor]
    device: Optional[torch.Tensor] = None


def verify(shard: Shard) -> None:
    if shard.payload.nbytes != shard.expected:
        raise CorruptShard(shard.name)


def fill(buf: torch.Tensor, data: np.ndarray) -> torch.Tensor:
    flat = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(-1))
    view = buf[: flat.numel()]
    view.copy_(flat)
    return view


class ShardCopier:
    """Copies shards one at a time or through a small in-flight window."""

    def __init__(self, pool: StagingPool, device: torch.device, window: int = 4) -> None:
        self.pool = pool
        self.device = device
        self.window = window
        self._inflight: Deque[InFlight] = deque()
        self._scratch: Optional[torch.Tensor] = None

    # -- blocking path ----------------------------------------------------
    def copy_now(self, shard: Shard) -> torch.Tensor:
        buf = self.pool.checkout()  # leak: verify raises CorruptShard and nobody holds the buffer
        verify(shard)
        try:
            return fill(buf, shard.payload).to(self.device)
        finally:
            self.pool.checkin(buf)

    def copy_checked(self, shard: Shard) -> Optional[torch.Tensor]:
        try:
            verify(shard)
        except CorruptShard:
            log.warning("skipping %s", shard.name)
            return None
        buf = self.pool.checkout()  # clean: verification came first, the finally gives it back
        try:
            if shard.compressed:
                return self._inflate(buf, shard)
            return fill(buf, shard.payload).to(self.device)
        finally:
            self.pool.checkin(buf)

    def _inflate(self, src: torch.Tensor, shard: Shard) -> Optional[torch.Tensor]:
        dst = self.pool.try_checkout()  # clean: the only early return is the None one
        if dst is None:
            return None
        n = fill(src, shard.payload).numel()
        take = min(n * 2, dst.numel())
        dst[:take:2].copy_(src[: (take + 1) // 2])
        out = dst[:take].to(self.device)
        self.pool.checkin(dst)
        return out

    # -- windowed path ----------------------------------------------------
    def submit(self, shard: Shard) -> None:
        buf = self.pool.checkout()  # clean: kept in the window entry, retired by _retire
        entry = InFlight(shard, buf)
        self._inflight.append(entry)
        entry.device = fill(buf, shard.payload).to(self.device, non_blocking=True)
        while len(self._inflight) > self.window:
            self._retire(self._inflight.popleft())

    def submit_large(self, shard: Shard) -> bool:
        buf = self.pool.checkout_at_least(shard.payload.nbytes)  # leak: a full window returns before the entry is made
        if buf is None:
            return False
        if len(self._inflight) >= self.window:
            log.info("window full, %s has to wait", shard.name)
            return False
        self._inflight.append(InFlight(shard, buf, fill(buf, shard.payload).to(self.device)))
        return True

    def _retire(self, entry: InFlight) -> Optional[torch.Tensor]:
        host, entry.host = entry.host, None
        if host is not None:
            self.pool.checkin(host)
        return entry.device

    def drain(self) -> Iterator[torch.Tensor]:
        while self._inflight:
            out = self._retire(self._inflight.popleft())
            if out is not None:
                yield out

    # -- scratch ----------------------------------------------------------
    def scratch(self, nbytes: int) -> torch.Tensor:
        if self._scratch is not None and self._scratch.numel() >= nbytes:
            return self._scratch
        if self._scratch is not None:
            self.pool.checkin(self._scratch)
            self._scratch = None
        self._scratch = self.pool.checkout()  # clean: the previous one went back, close gives this back
        return self._scratch

    def realign(self, alignment: int) -> None:
        fresh = self.pool.checkout_aligned(alignment)  # clean: kept as the scratch, which close gives back
        if fresh is None:
            return
        old, self._scratch = self._scratch, fresh
        if old is not None:
            self.pool.checkin(old)

    def close(self) -> None:
        for _ in self.drain():
            pass
        if self._scratch is not None:
            self.pool.checkin(self._scratch)
            self._scratch = None


def concat_pair(pool: StagingPool, left: np.ndarray, right: np.ndarray) -> torch.Tensor:
    a = pool.checkout()  # leak: the second checkout may raise StagingExhausted outside the try
    b = pool.checkout()  # clean: the finally follows at once
    try:
        return torch.cat([fill(a, left), fill(b, right)])
    finally:
        pool.checkin(b)
        pool.checkin(a)


def interleave_pair(pool: StagingPool, left: np.ndarray, right: np.ndarray) -> torch.Tensor:
    a = pool.checkout()  # clean: the outer finally also covers the second checkout
    try:
        b = pool.checkout()  # clean: inner finally
        try:
            return torch.stack([fill(a, left), fill(b, right)], dim=1).reshape(-1)
        finally:
            pool.checkin(b)
    finally:
        pool.checkin(a)


def warm(pool: StagingPool, shards: Sequence[Shard], touch: Callable[[torch.Tensor], None]) -> int:
    """Touch a page of each buffer so the first epoch does not fault."""
    held: Dict[str, torch.Tensor] = {}
    for shard in shards:
        buf = pool.try_checkout()  # leak: shards of one group share a key, the later buffer replaces the earlier
        if buf is None:
            break
        held[shard.name.rpartition("-")[0]] = buf
    for buf in held.values():
        touch(buf)
        pool.checkin(buf)
    return len(held)


def probe(pool: StagingPool, shards: Sequence[Shard]) -> List[str]:
    bad: List[str] = []
    for shard in shards:
        buf = pool.try_checkout()  # clean: the finally also runs on the continue
        if buf is None:
            bad.append(shard.name)
            continue
        try:
            if shard.compressed:
                continue
            if not torch.equal(fill(buf, shard.payload), fill(buf, shard.payload)):
                bad.append(shard.name)
        finally:
            pool.checkin(buf)
    return bad
