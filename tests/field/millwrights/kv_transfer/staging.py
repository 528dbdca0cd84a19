"""Registered host memory cut in equal regions, and the credits that bound what is in flight."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class Region:
    index: int
    tensor: torch.Tensor
    used: int = 0

    def write(self, src: torch.Tensor) -> None:
        flat = src.reshape(-1)
        self.tensor[: flat.numel()].copy_(flat)
        self.used = flat.numel()


class StagingPool:
    def __init__(self, count: int, elements: int) -> None:
        self.elements = elements
        self._cv = threading.Condition()
        self._idle = [Region(i, torch.empty(elements, pin_memory=True)) for i in range(count)]
        self.count = count

    def checkout(self, timeout: Optional[float] = None) -> Optional[Region]:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._idle), timeout):
                return None
            return self._idle.pop()

    def checkout_nowait(self) -> Optional[Region]:
        with self._cv:
            return self._idle.pop() if self._idle else None

    def checkin(self, region: Region) -> None:
        region.used = 0
        with self._cv:
            self._idle.append(region)
            self._cv.notify()

    def checkout_pair(self, timeout: float) -> Optional[tuple[Region, Region]]:
        """One region for keys, one for values."""
        keys = self.checkout(timeout)  # leak: not checked in when no region is left for the values
        if keys is None:
            return None
        values = self.checkout(timeout)  # clean: handed to the caller in the pair
        if values is None:
            return None
        return keys, values

    def checkout_exactly(self, n: int) -> list[Region]:
        got: list[Region] = []
        while len(got) < n:
            region = self.checkout_nowait()  # clean: returned in the list or rolled back
            if region is None:
                for back in got:
                    self.checkin(back)
                return []
            got.append(region)
        return got


class Credits:
    """Window of transfers the peer has agreed to."""

    def __init__(self, window: int) -> None:
        self._sem = threading.BoundedSemaphore(window)
        self.window = window

    def take(self, timeout: float) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: the answer tells the caller that it holds a credit

    def give(self) -> None:
        self._sem.release()
