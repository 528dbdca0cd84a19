"""Streaming of tar shards with leases handed out by a coordinator."""
from __future__ import annotations

import io
import itertools
import random
import tarfile
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Callable, Iterator, Optional

Sample = dict[str, Any]


@dataclass(frozen=True)
class ShardLease:
    shard: str
    epoch: int
    token: int


class ShardCoordinator:
    def __init__(self, shards: list[str]) -> None:
        self._todo: deque[str] = deque(shards)
        self._leased: dict[int, ShardLease] = {}
        self._tokens = itertools.count()
        self.blocked: set[str] = set()
        self.epoch = 0

    def lease_shard(self) -> Optional[ShardLease]:
        if not self._todo:
            return None
        lease = ShardLease(self._todo.popleft(), self.epoch, next(self._tokens))
        self._leased[lease.token] = lease
        return lease

    def lease_unblocked(self) -> Optional[ShardLease]:
        while self._todo:
            shard = self._todo.popleft()  # leak: a blocked shard is taken off the queue and put nowhere
            if shard in self.blocked:
                continue
            lease = ShardLease(shard, self.epoch, next(self._tokens))
            self._leased[lease.token] = lease
            return lease
        return None

    def ack(self, lease: ShardLease) -> None:
        self._leased.pop(lease.token)

    def nack(self, lease: ShardLease) -> None:
        self._leased.pop(lease.token)
        self._todo.appendleft(lease.shard)


class LeasedShard:
    """Context manager around one lease: ack on success, nack otherwise."""

    def __init__(self, coordinator: ShardCoordinator) -> None:
        self.coordinator = coordinator
        self.lease: Optional[ShardLease] = None

    def __enter__(self) -> Optional[ShardLease]:
        self.lease = self.coordinator.lease_shard()  # clean: near miss, __exit__ acks or nacks every lease it got
        return self.lease

    def __exit__(self, exc_type: Optional[type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if self.lease is None:
            return False
        if exc_type is None:
            self.coordinator.ack(self.lease)
            return False
        self.coordinator.nack(self.lease)
        return False


class PeekedShard:
    """Looks at a shard and hands it back for somebody else."""

    def __init__(self, coordinator: ShardCoordinator) -> None:
        self.coordinator = coordinator
        self.lease: Optional[ShardLease] = None

    def __enter__(self) -> Optional[ShardLease]:
        self.lease = self.coordinator.lease_shard()  # leak: __exit__ returns early after a swallowed TarError
        return self.lease

    def __exit__(self, exc_type: Optional[type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]) -> bool:
        if self.lease is None:
            return False
        if exc_type is not None and issubclass(exc_type, tarfile.TarError):
            return True
        self.coordinator.nack(self.lease)
        return False


class ShardStream:
    def __init__(self, coordinator: ShardCoordinator, fetch: Callable[[str], bytes], ahead: int = 2) -> None:
        self.coordinator = coordinator
        self.fetch = fetch
        self.ahead = ahead
        self._window: deque[tuple[ShardLease, bytes]] = deque()
        self._quarantine: list[ShardLease] = []

    def _decode(self, payload: bytes) -> Iterator[Sample]:
        with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
            for member in tar:
                body = tar.extractfile(member)
                if body is not None:
                    yield {"key": member.name, "data": body.read()}

    def _fill(self) -> None:
        while len(self._window) < self.ahead:
            lease = self.coordinator.lease_shard()  # clean: near miss, sits in the window until samples acks it or reset nacks it
            if lease is None:
                return
            self._window.append((lease, self.fetch(lease.shard)))

    def samples(self) -> Iterator[Sample]:
        self._fill()
        while self._window:
            lease, payload = self._window[0]
            yield from self._decode(payload)
            self._window.popleft()
            self.coordinator.ack(lease)
            self._fill()

    def reset(self) -> None:
        while self._window:
            lease, _ = self._window.pop()
            self.coordinator.nack(lease)

    def shuffled(self, buffer_size: int) -> Iterator[Sample]:
        while True:
            lease = self.coordinator.lease_unblocked()  # leak: an empty payload goes on to the next shard without ack
            if lease is None:
                return
            payload = self.fetch(lease.shard)
            if not payload:
                continue
            pool = list(itertools.islice(self._decode(payload), buffer_size))
            random.shuffle(pool)
            self.coordinator.ack(lease)
            yield from pool

    def resilient(self) -> Iterator[Sample]:
        while (lease := self.coordinator.lease_shard()) is not None:  # clean: near miss, the handler keeps it in the quarantine that requeue empties
            try:
                payload = self.fetch(lease.shard)
            except OSError:
                self._quarantine.append(lease)
                continue
            try:
                yield from self._decode(payload)
            finally:
                self.coordinator.ack(lease)

    def requeue(self) -> int:
        count = len(self._quarantine)
        for lease in self._quarantine:
            self.coordinator.nack(lease)
        self._quarantine.clear()
        return count

    def first_sample(self) -> Optional[Sample]:
        with PeekedShard(self.coordinator) as lease:  # leak: a broken tar is swallowed and the lease never comes back
            if lease is None:
                return None
            for sample in self._decode(self.fetch(lease.shard)):
                return sample
        return None

    def count_samples(self) -> int:
        total = 0
        while True:
            with LeasedShard(self.coordinator) as lease:  # clean: the context manager acks or nacks
                if lease is None:
                    return total
                total += sum(1 for _ in self._decode(self.fetch(lease.shard)))

    def skip_to(self, epoch: int) -> Optional[Sample]:
        lease = self.coordinator.lease_shard()  # clean: near miss, nacked in the stale branch and acked in the other
        if lease is None:
            return None
        if lease.epoch != epoch:
            self.coordinator.nack(lease)
            return None
        sample = next(self._decode(self.fetch(lease.shard)), None)
        self.coordinator.ack(lease)
        return sample

    def warm_up(self, shards: int) -> int:
        leases = [self.coordinator.lease_shard() for _ in range(shards)]  # leak: only the first one is nacked after the fetches
        got = [lease for lease in leases if lease is not None]
        nbytes = sum(len(self.fetch(lease.shard)) for lease in got)
        if got:
            self.coordinator.nack(got[0])
        return nbytes
