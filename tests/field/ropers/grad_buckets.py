"""Gradient buckets for overlapping reduce-scatter with backward."""
from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional, Tuple


class Bucket:
    def __init__(self, bid: int, capacity: int) -> None:
        self.bid = bid
        self.capacity = capacity
        self.grads: List[float] = []

    def fits(self, n: int) -> bool:
        return len(self.grads) + n <= self.capacity


class BucketAllocator:
    def __init__(self, n: int, capacity: int) -> None:
        self._stock = [Bucket(i, capacity) for i in range(n)]
        self.dealt = 0

    def allocate(self) -> Optional[Bucket]:
        if not self._stock:
            return None
        self.dealt += 1
        return self._stock.pop()

    def deallocate(self, bucket: Bucket) -> None:
        self.dealt -= 1
        bucket.grads.clear()
        self._stock.append(bucket)


class OverlappedReducer:
    def __init__(self, alloc: BucketAllocator) -> None:
        self.alloc = alloc
        self.current: Optional[Bucket] = None
        self.reducing: Deque[Bucket] = deque()
        self.norms: Dict[str, float] = {}

    def add(self, grad: List[float]) -> bool:
        if self.current is not None and not self.current.fits(len(grad)):
            self.reducing.append(self.current)
            self.current = None
        if self.current is None:
            self.current = self.alloc.allocate()  # clean: near miss, the full bucket was queued before, flush takes both out
        if self.current is None:
            return False
        self.current.grads.extend(grad)
        return True

    def flush(self) -> float:
        if self.current is not None:
            self.reducing.append(self.current)
            self.current = None
        total = 0.0
        while self.reducing:
            bucket = self.reducing.popleft()
            total += sum(bucket.grads)
            self.alloc.deallocate(bucket)
        return total

    def add_sparse(self, name: str, rows: List[Tuple[int, float]]) -> bool:
        bucket = self.alloc.allocate()  # leak: rows that do not fit return False with the bucket taken
        if bucket is None:
            return False
        if not bucket.fits(len(rows)):
            return False
        bucket.grads.extend(v for _, v in rows)
        self.norms[name] = sum(bucket.grads)
        self.alloc.deallocate(bucket)
        return True

    def clip(self, groups: Dict[str, List[float]], limit: float) -> List[str]:
        clipped = []
        for name, grads in groups.items():
            bucket = self.alloc.allocate()  # clean: near miss, continue comes after the bucket is given back
            if bucket is None:
                break
            bucket.grads.extend(grads)
            norm = sum(g * g for g in bucket.grads)
            self.alloc.deallocate(bucket)
            if norm <= limit:
                continue
            clipped.append(name)
        return clipped

    def norm_of(self, grads: List[float]) -> float:
        bucket = self.alloc.allocate()  # leak: a zero norm is raised and caught, the bucket stays out
        if bucket is None:
            return 0.0
        try:
            bucket.grads.extend(grads)
            norm = 1.0 / sum(g * g for g in bucket.grads)
        except ZeroDivisionError:
            return 0.0
        self.alloc.deallocate(bucket)
        return norm


if __name__ == "__main__":
    al = BucketAllocator(4, 4)
    red = OverlappedReducer(al)
    for _ in range(3):
        red.add([1.0, 2.0, 3.0])
    assert red.flush() == 18.0
    assert red.clip({"a": [3.0], "b": [0.1]}, 1.0) == ["a"]
    assert al.dealt == 0
