"""Trainer side."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterator, Optional

import torch

from .versions import BucketPool, ReadLease, VersionTable

log = logging.getLogger("wsync.trainer")

Broadcast = Callable[[torch.Tensor, int], bool]


class WeightPublisher:
    def __init__(self, table: VersionTable, pool: BucketPool, broadcast: Broadcast) -> None:
        self.table = table
        self.pool = pool
        self.broadcast = broadcast
        self.publish_lock = threading.Lock()
        self.executor = ThreadPoolExecutor(2)
        self.last_sent = -1
        self.frozen: Optional[ReadLease] = None

    def _copy_in(self, index: int, t: torch.Tensor) -> int:
        raw = t.contiguous().view(torch.uint8).reshape(-1)
        self.pool.storage[index][: raw.numel()].copy_(raw)
        return raw.numel()

    def _buckets(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
        """Name, bucket and size; whoever iterates reclaims each bucket."""
        for name, t in tensors.items():
            index = self.pool.lend()  # clean: handed to the consumer with the yield
            yield name, index, self._copy_in(index, t)

    def publish(self, number: int) -> bool:
        lease = self.table.read(number)  # clean: ended in finally
        if lease is None:
            return False
        try:
            for name, index, size in self._buckets(lease.version.tensors):  # clean: each bucket is reclaimed in the loop
                ok = self.broadcast(self.pool.storage[index][:size], number)
                self.pool.reclaim(index)
                if not ok:
                    log.warning("broadcast of %s failed", name)
                    return False
            self.last_sent = number
            return True
        finally:
            lease.end()

    def publish_changed(self, number: int, changed: set[str]) -> int:
        lease = self.table.read(number)  # clean: ended after the loop
        if lease is None:
            return 0
        sent = 0
        for name, index, size in self._buckets(lease.version.tensors):  # leak: the unchanged are not reclaimed
            if name not in changed:
                continue
            self.broadcast(self.pool.storage[index][:size], number)
            self.pool.reclaim(index)
            sent += 1
        lease.end()
        return sent

    def publish_latest(self) -> bool:
        lease = self.table.read_latest()  # leak: nothing new to send, and the return keeps the reader counted
        if lease is None or lease.number == self.last_sent:
            return False
        ok = True
        for name, t in lease.version.tensors.items():
            index = self.pool.lend()  # clean: reclaimed in the same round
            ok = self.broadcast(self.pool.storage[index][: self._copy_in(index, t)], lease.number) and ok
            self.pool.reclaim(index)
        self.last_sent = lease.number
        lease.end()
        return ok

    def publish_background(self, number: int) -> None:
        lease = self.table.read(number)  # clean: near miss, the executor's job ends it
        if lease is None:
            return
        self.executor.submit(self._send_leased, lease)

    def _send_leased(self, lease: ReadLease) -> None:
        try:
            for t in lease.version.tensors.values():
                index = self.pool.lend()  # clean: reclaimed in the same round
                self.broadcast(self.pool.storage[index][: self._copy_in(index, t)], lease.number)
                self.pool.reclaim(index)
        finally:
            lease.end()

    def exclusive(self, number: int, timeout: float) -> bool:
        if not self.publish_lock.acquire(timeout=timeout):  # leak: a version that is gone returns with the lock held
            return False
        lease = self.table.read(number)  # clean: ended below
        if lease is None:
            return False
        for t in lease.version.tensors.values():
            self.broadcast(t, number)
        lease.end()
        self.publish_lock.release()
        return True

    def freeze(self, number: int) -> bool:
        """Keeps a reference policy alive for the KL term."""
        fresh = self.table.read(number)  # clean: near miss, the former one is ended; thaw ends the last
        if fresh is None:
            return False
        if self.frozen is not None:
            self.frozen.end()
        self.frozen = fresh
        return True

    def thaw(self) -> None:
        if self.frozen is not None:
            self.frozen.end()
            self.frozen = None

    def fused(self, number: int, width: int) -> int:
        indices = self.pool.lend_some(width)  # clean: all are reclaimed at the end
        lease = self.table.read(number)  # clean: ended when there
        sent = 0
        if lease is not None:
            for index, t in zip(indices, lease.version.tensors.values()):
                self._copy_in(index, t)
                sent += self.broadcast(self.pool.storage[index], number)
            lease.end()
        self.pool.reclaim_all(indices)
        return sent
