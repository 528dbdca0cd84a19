from __future__ import annotations

from collections import deque

import torch

from .buckets import Bucket, BucketPool, IpcTable


class UpdateGate:
    """Generation is paused while somebody is in the gate."""

    def __init__(self) -> None:
        self.pausers = 0

    def pause(self) -> None:
        self.pausers += 1

    def resume(self) -> None:
        self.pausers -= 1


class WeightReceiver:
    def __init__(self, ipc: IpcTable, pool: BucketPool, weights: dict[str, torch.Tensor]) -> None:
        self.ipc = ipc
        self.pool = pool
        self.weights = weights
        self.gate = UpdateGate()
        self.backlog: deque[int] = deque()
        self.rollback: Bucket | None = None

    def _scatter(self, bucket: Bucket) -> bool:
        pos = 0
        for name in bucket.names:
            dst = self.weights.get(name)
            if dst is None:
                return False
            dst.copy_(bucket.data[pos : pos + dst.numel()].view_as(dst))
            pos += dst.numel()
        return True

    def apply(self, handle: int) -> bool:
        self.gate.pause()  # clean: near miss, resumed in the finally on both returns
        try:
            bucket = self.ipc.resolve(handle)
            if bucket is None:
                return False
            return self._scatter(bucket)
        finally:
            self.gate.resume()

    def enqueue(self, handle: int) -> bool:
        self.backlog.append(handle)
        return len(self.backlog) < 64

    def drain(self) -> int:
        applied = 0
        self.gate.pause()  # leak: the return at a handle that resolves to nothing comes before resume
        while self.backlog:
            bucket = self.ipc.resolve(self.backlog.popleft())
            if bucket is None:
                return applied
            applied += self._scatter(bucket)
        self.gate.resume()
        return applied

    def save_rollback(self, name: str) -> bool:
        bucket = self.pool.rent()  # leak: a second save overwrites the bucket kept in rollback
        if bucket is None:
            return False
        if not bucket.add(name, self.weights[name]):
            self.pool.give(bucket)
            return False
        self.rollback = bucket
        return True

    def restore(self) -> bool:
        bucket, self.rollback = self.rollback, None
        if bucket is None:
            return False
        ok = self._scatter(bucket)
        self.pool.give(bucket)
        return ok
