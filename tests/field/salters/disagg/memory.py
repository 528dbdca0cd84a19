"""Registered regions and transfer handles for prefill/decode disaggregation."""
from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, Optional


@dataclass(eq=False)
class Region:
    index: int
    nbytes: int
    filled: int = 0


class RegionPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._cond = threading.Condition()
        self._idle = [Region(i, nbytes) for i in range(count)]
        self._credits = threading.Semaphore(count)

    def checkout(self, timeout: float = 5.0) -> Optional[Region]:
        if not self._credits.acquire(timeout=timeout):  # clean: near miss, checkin() releases the credit
            return None
        with self._cond:
            return self._idle.pop()

    def checkout_sized(self, nbytes: int, timeout: float = 5.0) -> Optional[Region]:
        if not self._credits.acquire(timeout=timeout):  # leak: no region fits, and the credit stays taken
            return None
        with self._cond:
            for i, region in enumerate(self._idle):
                if region.nbytes >= nbytes:
                    return self._idle.pop(i)
        return None

    def checkin(self, region: Region) -> None:
        with self._cond:
            region.filled = 0
            self._idle.append(region)
        self._credits.release()

    @contextmanager
    def region(self) -> Iterator[Optional[Region]]:
        region = self.checkout()  # clean: given back in the finally
        try:
            yield region
        finally:
            if region is not None:
                self.checkin(region)


class TransferEngine:
    """Hands out integer handles; a handle must be retired once its transfer is over."""

    def __init__(self, max_inflight: int = 64) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, str] = {}
        self._max = max_inflight
        self._done: dict[int, Callable[[int], None]] = {}

    def post(self, peer: str) -> Optional[int]:
        if len(self._open) >= self._max:
            return None
        handle = next(self._ids)
        self._open[handle] = peer
        return handle

    def poll(self, handle: int) -> str:
        return "DONE" if handle % 3 else "PENDING"

    def retire(self, handle: int) -> None:
        self._open.pop(handle, None)
        callback = self._done.pop(handle, None)
        if callback is not None:
            callback(handle)

    def on_retired(self, handle: int, callback: Callable[[int], None]) -> None:
        self._done[handle] = callback
