from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass
class Bucket:
    bid: int
    data: torch.Tensor
    names: list[str] = field(default_factory=list)
    filled: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> bool:
        n = tensor.numel()
        if self.filled + n > self.data.numel():
            return False
        self.data[self.filled : self.filled + n].copy_(tensor.flatten())
        self.names.append(name)
        self.filled += n
        return True


class BucketPool:
    def __init__(self, count: int, numel: int) -> None:
        self._lock = threading.Lock()
        self._spare = [Bucket(i, torch.empty(numel)) for i in range(count)]

    def rent(self) -> Bucket | None:
        with self._lock:
            return self._spare.pop() if self._spare else None

    def give(self, bucket: Bucket) -> None:
        bucket.names.clear()
        bucket.filled = 0
        with self._lock:
            self._spare.append(bucket)


class IpcTable:
    """Exports device memory to other processes; an export stays open until it is closed."""

    def __init__(self) -> None:
        self._exports: dict[int, Bucket] = {}
        self._seq = 0

    def export(self, bucket: Bucket) -> int:
        self._seq += 1
        self._exports[self._seq] = bucket
        return self._seq

    def resolve(self, handle: int) -> Bucket | None:
        return self._exports.get(handle)

    def unexport(self, handle: int) -> None:
        self._exports.pop(handle, None)
