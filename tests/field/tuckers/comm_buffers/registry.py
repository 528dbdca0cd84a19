"""Registered communication buffers. Registration is expensive, so buckets are kept per size class."""
import threading
from collections import defaultdict
from typing import Dict, List, Optional, Protocol

import torch


class Releasable(Protocol):
    def release(self) -> None: ...


class Bucket:
    def __init__(self, home: "BucketRegistry", cls: int):
        self.home = home
        self.cls = cls
        self.flat = torch.empty(1 << cls, dtype=torch.bfloat16, device="cuda")
        self.fill = 0

    def add(self, grad: torch.Tensor) -> bool:
        n = grad.numel()
        if self.fill + n > self.flat.numel():
            return False
        self.flat[self.fill : self.fill + n].copy_(grad.flatten())
        self.fill += n
        return True

    def release(self) -> None:
        self.fill = 0
        self.home.restore(self)


class BucketRegistry:
    def __init__(self, per_class: int = 8):
        self.per_class = per_class
        self._made: Dict[int, int] = defaultdict(int)
        self._spare: Dict[int, List[Bucket]] = defaultdict(list)
        self._lock = threading.Lock()

    @staticmethod
    def size_class(numel: int) -> int:
        return max(10, (numel - 1).bit_length())

    def obtain(self, numel: int) -> Optional[Bucket]:
        cls = self.size_class(numel)
        with self._lock:
            if self._spare[cls]:
                return self._spare[cls].pop()
            if self._made[cls] >= self.per_class:
                return None
            self._made[cls] += 1
        return Bucket(self, cls)

    def restore(self, bucket: Bucket) -> None:
        with self._lock:
            self._spare[bucket.cls].append(bucket)

    def obtain_or_larger(self, numel: int) -> Optional[Bucket]:
        for shift in range(3):
            bucket = self.obtain(numel << shift)  # clean: handed to the caller
            if bucket is not None:
                return bucket
        return None

    def obtain_zeroed(self, numel: int) -> Optional[Bucket]:
        bucket = self.obtain_or_larger(numel)  # clean: handed to the caller
        if bucket is not None:
            bucket.flat.zero_()
        return bucket

    def prime(self, classes: List[int]) -> int:
        """Make one bucket per class ahead of training, so that the first step doesn't register."""
        made = []
        for cls in classes:
            bucket = self.obtain(1 << cls)  # clean: near miss, collected and restored below
            if bucket is not None:
                made.append(bucket)
        for bucket in made:
            self.restore(bucket)
        return len(made)

    def probe(self, classes: List[int]) -> Dict[int, bool]:
        """Which classes can still give a bucket."""
        return {cls: self.obtain(1 << cls) is not None for cls in classes}  # leak: tested and dropped
