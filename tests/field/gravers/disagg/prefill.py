"""Prefill side: computes KV layer by layer and pushes it out of staging regions."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

from .staging import Channel, ChannelTable, StagingPool, StagingRegion


@dataclass
class KvJob:
    job_id: int
    peer: str
    layer_bytes: list[int]
    priority: int = 0
    cancelled: bool = False
    region: StagingRegion | None = None
    sent: list[int] = field(default_factory=list)


Fill = Callable[[KvJob, int, StagingRegion], int]


class PrefillSender:
    def __init__(self, pool: StagingPool, channels: ChannelTable, fill: Fill):
        self.pool = pool
        self.channels = channels
        self.fill = fill
        self.awaiting_ack: dict[tuple[int, int], tuple[Channel, StagingRegion]] = {}
        self.rejected = 0

    def push_sync(self, job: KvJob) -> bool:
        chan = self.channels.connect(job.peer)  # clean: disconnected in finally
        if chan is None:
            return False
        try:
            for layer, size in enumerate(job.layer_bytes):
                region = self.pool.obtain(size)  # leak: the cancelled break leaves the last region
                if region is None:
                    return False
                region.filled = self.fill(job, layer, region)
                if job.cancelled:
                    break
                chan.posted.append(region.offset)
                job.sent.append(layer)
                self.pool.restore(region)
        finally:
            self.channels.disconnect(chan)
        return not job.cancelled

    def push_layers(self, job: KvJob) -> int:
        chan = self.channels.connect(job.peer)  # clean: near miss, one exit after the loop
        if chan is None:
            return 0
        done = 0
        for layer, size in enumerate(job.layer_bytes):
            region = self.pool.obtain(size)  # clean: restored before the break is looked at
            if region is None:
                break
            region.filled = self.fill(job, layer, region)
            chan.posted.append(region.offset)
            self.pool.restore(region)
            if job.cancelled:
                break
            done += 1
        self.channels.disconnect(chan)
        return done

    def post(self, job: KvJob, layer: int) -> bool:
        size = job.layer_bytes[layer]
        region = self.pool.obtain(size, timeout=1.0)  # leak: not restored if the peer gives no channel
        if region is None:
            return False
        chan = self.channels.connect(job.peer)  # clean: near miss, kept until on_ack
        if chan is None:
            self.rejected += 1
            return False
        region.filled = self.fill(job, layer, region)
        chan.posted.append(region.offset)
        self.awaiting_ack[job.job_id, layer] = (chan, region)
        return True

    def post_rollback(self, job: KvJob, layer: int) -> bool:
        region = self.pool.obtain(job.layer_bytes[layer], timeout=1.0)  # clean: restored, or kept to on_ack
        if region is None:
            return False
        chan = self.channels.connect(job.peer)  # clean: kept with the region until on_ack
        if chan is None:
            self.pool.restore(region)
            self.rejected += 1
            return False
        region.filled = self.fill(job, layer, region)
        chan.posted.append(region.offset)
        self.awaiting_ack[job.job_id, layer] = (chan, region)
        return True

    def on_ack(self, job_id: int, layer: int) -> None:
        chan, region = self.awaiting_ack.pop((job_id, layer))
        self.pool.restore(region)
        self.channels.disconnect(chan)

    def preload(self, job: KvJob) -> None:
        if job.region is None:
            job.region = self.pool.obtain(max(job.layer_bytes))  # clean: near miss, discard restores it

    def discard(self, job: KvJob) -> None:
        if job.region is not None:
            self.pool.restore(job.region)
            job.region = None

    def ping(self, peer: str) -> bool:
        chan = self.channels.connect(peer)  # leak: a broken channel is reported but stays counted as live
        if chan is None:
            return False
        chan.posted.append(0)
        if chan.broken:
            return False
        self.channels.disconnect(chan)
        return True
