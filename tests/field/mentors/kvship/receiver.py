from __future__ import annotations

import logging

from .buffers import Lease, SlabPool
from .channel import Channel

logger = logging.getLogger(__name__)


class Receiver:
    def __init__(self, pool: SlabPool, channel: Channel) -> None:
        self.pool = pool
        self.channel = channel
        self.partial: dict[str, list[Lease]] = {}
        self.scratch: Lease | None = None

    def receive(self) -> tuple[str, bytes] | None:
        frame = self.channel.pull()  # clean: near miss, its credit and lease go back before the result is looked at
        if frame is None:
            return None
        data = frame.lease.payload()
        self.pool.close_lease(frame.lease)
        self.channel.return_credit()
        return (frame.key, data) if data else None

    def receive_layers(self) -> bytes | None:
        frame = self.channel.pull()  # clean: near miss, the lease waits in partial, and is closed with the last one or by discard
        if frame is None:
            return None
        self.channel.return_credit()
        key = frame.key.partition("/")[0]
        self.partial.setdefault(key, []).append(frame.lease)
        if not frame.last:
            return None
        leases = self.partial.pop(key)
        data = b"".join(x.payload() for x in leases)
        for x in leases:
            self.pool.close_lease(x)
        return data

    def peek_size(self) -> int:
        frame = self.channel.pull()  # leak: only the size is used, lease and credit go with the frame
        return 0 if frame is None else frame.lease.used

    def discard(self, key: str) -> None:
        for lease in self.partial.pop(key, []):
            self.pool.close_lease(lease)

    def compact(self, key: str) -> bool:
        leases = self.partial.get(key, [])
        total = sum(x.used for x in leases)
        if len(leases) < 2 or total > self.pool.nbytes:
            return False
        merged = self.pool.open_lease()  # leak: it takes the place of the parts, whose leases are not closed
        if merged is None:
            return False
        for x in leases:
            merged.slab[merged.used : merged.used + x.used] = x.payload()
            merged.used += x.used
        self.partial[key] = [merged]
        return True

    def decode(self, raw: bytes) -> bytes:
        if self.scratch is None:
            self.scratch = self.pool.open_lease(timeout=1.0)  # clean: near miss, taken once and closed in close
        if self.scratch is None:
            return raw[::-1]
        n = min(len(raw), self.pool.nbytes)
        self.scratch.slab[:n] = raw[:n]
        self.scratch.used = n
        return self.scratch.payload()[::-1]

    def verify(self, expected: bytes) -> bool:
        with self.pool.leased() as lease:  # clean: near miss, both returns leave the block in order
            if lease is None or len(expected) > self.pool.nbytes:
                return False
            lease.slab[: len(expected)] = expected
            lease.used = len(expected)
            return lease.payload() == expected

    def close(self) -> None:
        for key in list(self.partial):
            self.discard(key)
        if self.scratch is not None:
            self.pool.close_lease(self.scratch)
            self.scratch = None
