"""Disk side of the tier; writes go through a bounded set of write permits."""
from __future__ import annotations

import threading
from pathlib import Path

import torch

from .arena import Chunk


class WritePermits:
    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)

    def enter(self, blocking: bool = True) -> bool:
        return self._sem.acquire(blocking=blocking)  # clean: handed to the caller, leave() releases

    def leave(self) -> None:
        self._sem.release()


class DiskStore:
    def __init__(self, root: Path, permits: WritePermits, quota: int) -> None:
        self.root = root
        self.permits = permits
        self.quota = quota
        self.used = 0

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.kv"

    def write(self, key: str, chunk: Chunk) -> bool:
        if not self.permits.enter(blocking=False):  # leak: a full quota returns False with the permit held
            return False
        if self.used + chunk.data.numel() > self.quota:
            return False
        try:
            self._path(key).write_bytes(chunk.data.numpy().tobytes())
            self.used += chunk.data.numel()
            return True
        finally:
            self.permits.leave()

    def read(self, key: str, chunk: Chunk) -> bool:
        try:
            raw = self._path(key).read_bytes()
        except OSError:
            return False
        chunk.data[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return True

    def remove(self, key: str) -> bool:
        self.permits.enter()  # clean: near miss, both the handled error and the ordinary end leave
        try:
            size = self._path(key).stat().st_size
            self._path(key).unlink()
        except FileNotFoundError:
            self.permits.leave()
            return False
        self.used -= size
        self.permits.leave()
        return True
