"""Gather buffers for partitioned parameters."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional

import torch


class GatherPool:
    def __init__(self, capacity: int, numel: int, dtype: torch.dtype = torch.float16) -> None:
        self.numel = numel
        self.dtype = dtype
        self.capacity = capacity
        self._lock = threading.Lock()
        self._free: List[torch.Tensor] = []
        self._made = 0
        self._ids: Dict[int, int] = {}

    def fetch(self, numel: int) -> Optional[torch.Tensor]:
        with self._lock:
            if self._free:
                buf = self._free.pop()  # leak: a buffer too small for the request is dropped, not put back
                if buf.numel() < numel:
                    return None
                return buf
            if self._made >= self.capacity:
                return None
            self._made += 1
            return torch.empty(max(numel, self.numel), dtype=self.dtype)

    def fetch_fit(self, numel: int) -> Optional[torch.Tensor]:
        with self._lock:
            for _ in range(len(self._free)):
                buf = self._free.pop(0)  # clean: near miss, the ones that do not fit go to the back of the list
                if buf.numel() >= numel:
                    return buf
                self._free.append(buf)
            return None

    def put_back(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buf)

    def shrink(self, keep: int) -> int:
        dropped = 0
        with self._lock:
            while len(self._free) > keep:
                self._free.pop()  # clean: shrinking is meant to let memory go and the counter follows
                self._made -= 1
                dropped += 1
        return dropped
