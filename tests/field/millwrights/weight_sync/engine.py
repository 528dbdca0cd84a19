"""Rollout side: an engine samples with one version and moves to the next between requests."""
from __future__ import annotations

import logging
from typing import Any, Optional

import torch

from .versions import BucketPool, ReadLease, VersionTable

log = logging.getLogger("wsync.engine")


class PinnedVersion:
    """with PinnedVersion(table, n) as tensors"""

    def __init__(self, table: VersionTable, number: int) -> None:
        self.table = table
        self.number = number
        self.lease: Optional[ReadLease] = None

    def __enter__(self) -> dict[str, torch.Tensor]:
        self.lease = self.table.read(self.number)  # clean: ended on exit
        return self.lease.version.tensors if self.lease else {}

    def __exit__(self, *exc: Any) -> None:
        if self.lease is None:
            return
        self.lease.end()
        self.lease = None


class RolloutEngine:
    def __init__(self, table: VersionTable, pool: BucketPool) -> None:
        self.table = table
        self.pool = pool
        self.current: Optional[ReadLease] = None
        self.sessions: dict[str, ReadLease] = {}
        self.received: dict[str, list[int]] = {}

    def update(self) -> bool:
        newest = self.table.read_latest()  # clean: near miss, ended when not newer, else current until the next
        if newest is None:
            return False
        if self.current is not None:
            if newest.number <= self.current.number:
                newest.end()
                return False
            self.current.end()
        self.current = newest
        return True

    def close(self) -> None:
        if self.current is not None:
            self.current.end()
            self.current = None

    def begin_session(self, sid: str) -> bool:
        """A multi-turn session stays on the version that it began with."""
        if sid in self.sessions:
            return True
        lease = self.table.read_latest()  # leak: end_session deletes the entry and leaves the reader counted
        if lease is None:
            return False
        self.sessions[sid] = lease
        return True

    def end_session(self, sid: str) -> Optional[int]:
        if sid not in self.sessions:
            return None
        number = self.sessions[sid].number
        del self.sessions[sid]
        return number

    def logprob(self, number: int, name: str) -> float:
        with PinnedVersion(self.table, number) as tensors:  # clean: context manager
            if name not in tensors:
                return 0.0
            return float(tensors[name].sum())

    def drift(self, a: int, b: int) -> Optional[float]:
        first, second = self.table.read(a), self.table.read(b)  # clean: near miss, each that exists is ended in finally
        try:
            if first is None or second is None:
                return None
            other = second.version.tensors
            return sum(float((t - other[k]).norm()) for k, t in first.version.tensors.items())
        finally:
            for lease in (first, second):
                if lease is not None:
                    lease.end()

    def begin_receive(self, key: str, most: int) -> int:
        self.abandon(key)
        self.received[key] = self.pool.lend_some(most)  # clean: near miss, apply or abandon reclaims
        return len(self.received[key])

    def apply(self, key: str, target: dict[str, torch.Tensor]) -> int:
        indices = self.received.pop(key, [])
        for index, t in zip(indices, target.values()):
            t.view(torch.uint8).reshape(-1).copy_(self.pool.storage[index][: t.numel() * t.element_size()])
        self.pool.reclaim_all(indices)
        return len(indices)

    def abandon(self, key: str) -> None:
        self.pool.reclaim_all(self.received.pop(key, []))

    def receive_once(self, most: int, fill) -> int:
        indices = self.pool.lend_some(most)  # leak: reclaims the filled ones only, the list is cut to their number
        indices = indices[: fill(indices)]
        done = len(indices)
        self.pool.reclaim_all(indices)
        return done

    def wait_for(self, number: int, polls: int) -> bool:
        for _ in range(polls):
            lease = self.table.read_latest()  # leak: a version too old is polled again and its reader stays
            if lease is None:
                continue
            if lease.number >= number:
                lease.end()
                return True
            log.debug("version %d is not there, latest is %d", number, lease.number)
        return False
