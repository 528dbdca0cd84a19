"""Prefill side: sends the blocks of finished prompts."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from .resources import Credits, MemoryRegion, RegionTable, WorkQueue

log = logging.getLogger(__name__)


@dataclass
class Outgoing:
    rid: str
    mr: MemoryRegion
    wrs: list[int] = field(default_factory=list)
    credits: int = 0


class KVSender:
    def __init__(self, table: RegionTable, credits: Credits, queue: WorkQueue):
        self.table, self.credits, self.queue = table, credits, queue
        self.outgoing: dict[str, Outgoing] = {}

    async def send(self, rid: str, addr: int, blocks: list[bytes]) -> bool:
        if rid in self.outgoing:
            return False
        mr = self.table.reg_mr(addr, sum(map(len, blocks)))  # clean: near miss, in outgoing, deregistered by on_ack
        if mr is None:
            return False
        out = Outgoing(rid, mr)
        self.outgoing[rid] = out
        for block in blocks:
            await self.credits.spend()  # clean: near miss, counted in the record and earned back by on_ack
            out.credits += 1
            wr = self.queue.post(block)  # clean: near miss, completed by on_ack or right below on retry
            while wr is None:
                await asyncio.sleep(0)
                self.reap(out)
                wr = self.queue.post(block)  # clean: near miss, the former was None
            out.wrs.append(wr)
        return True

    def reap(self, out: Outgoing) -> None:
        for wr in [w for w in out.wrs if self.queue.done(w)]:
            out.wrs.remove(wr)
            self.queue.complete(wr)

    async def on_ack(self, rid: str) -> None:
        out = self.outgoing.pop(rid)
        for wr in out.wrs:
            self.queue.complete(wr)
        await self.credits.earn(out.credits)
        self.table.dereg_mr(out.mr)

    async def send_control(self, message: bytes) -> bool:
        if not self.credits.try_spend():  # leak: a full queue returns with the credit spent
            return False
        wr = self.queue.post(message)  # clean: completed below
        if wr is None:
            log.warning("control message dropped, queue full")
            return False
        await asyncio.sleep(0)
        self.queue.complete(wr)
        await self.credits.earn()
        return True


class LayerwiseSender:
    """Sends layer after layer while the prefill runs."""

    def __init__(self, table: RegionTable, queue: WorkQueue, layers: int):
        self.table, self.queue, self.layers = table, queue, layers
        self.regions: dict[str, list[MemoryRegion]] = {}
        self.posted: dict[str, list[int]] = {}

    def on_layer(self, rid: str, layer: int, addr: int, data: bytes) -> bool:
        mr = self.table.reg_mr(addr, len(data))  # leak: a full queue returns before the region is in the list
        if mr is None:
            return False
        wr = self.queue.post(data)  # leak: on_done completes the last layer's only
        if wr is None:
            return False
        self.regions.setdefault(rid, []).append(mr)
        self.posted.setdefault(rid, []).append(wr)
        return layer == self.layers - 1

    def on_done(self, rid: str) -> None:
        for mr in self.regions.pop(rid, []):
            self.table.dereg_mr(mr)
        wrs = self.posted.pop(rid, [])
        if wrs:
            self.queue.complete(wrs[-1])


def with_region(table: RegionTable, addr: int, length: int, queue: WorkQueue) -> tuple[MemoryRegion, int] | None:
    """Region and posted descriptor for one-sided reads."""
    mr = table.reg_mr(addr, length)  # clean: deregistered when nothing could be posted, else returned
    if mr is None:
        return None
    wr = queue.post(mr.rkey.to_bytes(8, "little"))  # clean: returned
    if wr is None:
        table.dereg_mr(mr)
        return None
    return mr, wr


def advertise(table: RegionTable, queue: WorkQueue, addr: int, length: int) -> int:
    """Tells the peer the key of a range, for the duration of one descriptor."""
    got = with_region(table, addr, length, queue)  # leak: the descriptor is completed, the region stays registered
    if got is None:
        return 0
    mr, wr = got
    queue.complete(wr)
    return mr.length
