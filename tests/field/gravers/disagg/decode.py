"""Decode side: receives KV into staging, copies it to the paged cache, acknowledges."""
from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Iterator

from .staging import Channel, ChannelTable, StagingPool, StagingRegion


class Landing:
    """Regions which receive one request; the receiver closes it after the copy."""

    def __init__(self, pool: StagingPool, sizes: list[int]):
        self.pool = pool
        self.regions = pool.obtain_many(sizes)  # clean: close restores them
        self.copied = 0

    def close(self) -> None:
        self.pool.restore_many(self.regions)
        self.regions = []


class MirrorLanding:
    """Lands KV twice, for a check of the wire format."""

    def __init__(self, pool: StagingPool, size: int):
        self.pool = pool
        self.primary = pool.obtain(size)  # clean: close restores it
        self.mirror = pool.obtain(size)  # leak: close only restores the primary
        self.mismatch = 0

    def compare(self) -> bool:
        if self.primary is None or self.mirror is None:
            return False
        if self.primary.filled != self.mirror.filled:
            self.mismatch += 1
        return self.mismatch == 0

    def close(self) -> None:
        if self.primary is not None:
            self.pool.restore(self.primary)
        self.primary = None
        self.mirror = None


class DecodeReceiver:
    def __init__(self, pool: StagingPool, channels: ChannelTable):
        self.pool = pool
        self.channels = channels
        self.landings: dict[int, Landing] = {}
        self.ready: deque[StagingRegion] = deque()
        self.bytes_in = 0

    def begin(self, job_id: int, sizes: list[int]) -> bool:
        landing = Landing(self.pool, sizes)  # clean: near miss, empty ones hold nothing, others are closed
        if not landing.regions:
            return False
        self.landings[job_id] = landing
        return True

    def complete(self, job_id: int) -> int:
        landing = self.landings.pop(job_id)
        total = sum(r.filled for r in landing.regions)
        self.bytes_in += total
        landing.close()
        return total

    def self_test(self, size: int, strict: bool) -> bool:
        probe = Landing(self.pool, [size, size])  # leak: the strict branch returns without close
        if not probe.regions:
            return False
        if strict and any(r.filled == 0 for r in probe.regions):
            return False
        probe.close()
        return True

    def poll(self, size: int) -> None:
        region = self.pool.obtain(size, timeout=0)  # leak: queued, but drain_ready does not restore it
        if region is not None:
            self.ready.append(region)

    def drain_ready(self) -> int:
        n = 0
        while self.ready:
            region = self.ready.popleft()
            n += region.filled
            self.bytes_in += region.filled
        return n

    @contextmanager
    def channel(self, peer: str) -> Iterator[Channel | None]:
        chan = self.channels.connect(peer)  # clean: disconnected after the yield
        try:
            yield chan
        finally:
            if chan is not None:
                self.channels.disconnect(chan)

    def _await_writes(self, chan: Channel) -> None:
        for _ in range(1000):
            if chan.broken or not chan.posted:
                return
            time.sleep(0.001)
        chan.broken = True

    def fetch(self, peer: str, sizes: list[int]) -> int:
        with self.channel(peer) as chan:  # clean: the context manager disconnects
            if chan is None:
                return 0
            regions = self.pool.obtain_many(sizes)  # leak: a broken channel returns early with all regions
            for region in regions:
                chan.posted.append(region.offset)
            self._await_writes(chan)
            got = sum(r.filled for r in regions)
            if chan.broken:
                return 0
            self.pool.restore_many(regions)
            return got

    def fetch_stack(self, peer: str, sizes: list[int]) -> int:
        with ExitStack() as stack:
            chan = stack.enter_context(self.channel(peer))  # clean: the stack leaves the channel
            if chan is None:
                return 0
            regions = self.pool.obtain_many(sizes)  # clean: near miss, the stack's callback restores them
            stack.callback(self.pool.restore_many, regions)
            chan.posted.extend(r.offset for r in regions)
            self._await_writes(chan)
            if chan.broken:
                return 0
            return sum(r.filled for r in regions)
