from __future__ import annotations

from typing import Iterable

import torch

from .buckets import Bucket, BucketPool, IpcTable
from .receiver import WeightReceiver


class WeightSender:
    def __init__(self, pool: BucketPool, ipc: IpcTable, receiver: WeightReceiver) -> None:
        self.pool = pool
        self.ipc = ipc
        self.receiver = receiver
        self.published: dict[str, int] = {}
        self.outstanding: list[Bucket] = []

    def _flush(self, bucket: Bucket) -> bool:
        handle = self.ipc.export(bucket)  # clean: near miss, closed and the bucket given back before the answer is looked at
        ok = self.receiver.apply(handle)
        self.ipc.unexport(handle)
        self.pool.give(bucket)
        return ok

    def sync(self, params: Iterable[tuple[str, torch.Tensor]]) -> bool:
        bucket = None
        for name, tensor in params:
            if bucket is None:
                bucket = self.pool.rent()  # clean: near miss, _flush gives it back, and an oversized tensor does so itself
                if bucket is None:
                    return False
            if bucket.add(name, tensor):
                continue
            if not self._flush(bucket):
                return False
            bucket = self.pool.rent()  # clean: near miss, flushed with the next full bucket or after the loop
            if bucket is None:
                return False
            if not bucket.add(name, tensor):
                self.pool.give(bucket)
                return False
        return bucket is None or self._flush(bucket)

    def sync_group(self, group: str, params: dict[str, torch.Tensor]) -> bool:
        bucket = self.pool.rent()  # leak: a group that does not fit returns False with the bucket rented
        if bucket is None:
            return False
        for name, tensor in params.items():
            if not bucket.add(f"{group}.{name}", tensor):
                return False
        return self._flush(bucket)

    def publish(self, group: str, tensor: torch.Tensor) -> bool:
        if group in self.published:
            self.withdraw(group)
        bucket = self.pool.rent()  # clean: near miss, given back if the tensor is too large, else by withdraw
        if bucket is None:
            return False
        if not bucket.add(group, tensor):
            self.pool.give(bucket)
            return False
        self.published[group] = self.ipc.export(bucket)  # clean: near miss, an earlier export of the group was withdrawn
        return True

    def withdraw(self, group: str) -> None:
        handle = self.published.pop(group)
        bucket = self.ipc.resolve(handle)
        self.ipc.unexport(handle)
        if bucket is not None:
            self.pool.give(bucket)

    def send_async(self, name: str, tensor: torch.Tensor) -> bool:
        bucket = self.pool.rent()  # clean: near miss, kept in outstanding until reap
        if bucket is None:
            return False
        self.outstanding.append(bucket)
        if not bucket.add(name, tensor):
            return False
        handle = self.ipc.export(bucket)  # leak: the handle goes to the receiver only, and reap gives back the buckets, never the exports
        return self.receiver.enqueue(handle)

    def reap(self) -> None:
        for bucket in self.outstanding:
            self.pool.give(bucket)
        self.outstanding = []

    def checksum(self, name: str, tensor: torch.Tensor) -> float | None:
        bucket = self.pool.rent()  # clean: given back in the finally
        if bucket is None:
            return None
        try:
            if not bucket.add(name, tensor):
                return None
            return float(bucket.data[: bucket.filled].sum())
        finally:
            self.pool.give(bucket)
