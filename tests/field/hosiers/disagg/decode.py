"""Decode side: prepares landing regions, polls for completion, moves requests into the batch."""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from .buffers import MetaSlots, Region, RegisteredPool


class Poll(Enum):
    WAITING = 1
    SUCCESS = 2
    FAILED = 3


@dataclass
class Landing:
    rid: str
    room: int
    meta: int
    regions: list[Region] = field(default_factory=list)
    state: Poll = Poll.WAITING


class DecodeQueue:
    def __init__(self, pool: RegisteredPool, metas: MetaSlots, layers: int) -> None:
        self.pool = pool
        self.metas = metas
        self.layers = layers
        self.landings: list[Landing] = []
        self.graveyard: list[Landing] = []
        self.shadow: dict[str, Region] = {}

    def prepare(self, rid: str, room: int) -> bool:
        regions = self.pool.register_n(self.layers)  # clean: kept in the landing or deregistered
        if not regions:
            return False
        meta = self.metas.acquire()  # leak: poll gives the regions of a failed landing back, never the slot
        if meta is None:
            for r in regions:
                r.deregister()
            return False
        self.landings.append(Landing(rid, room, meta, regions))
        return True

    def prepare_degraded(self, rid: str) -> bool:
        regions = self.pool.register_some(self.layers, 1)  # leak: one region is deregistered of many
        if not regions:
            return False
        ok = len(regions) * self.pool.size >= 1 << 20
        regions[0].deregister()
        return ok

    def poll(self, states: dict[int, Poll]) -> list[Landing]:
        ready: list[Landing] = []
        keep: list[Landing] = []
        for ld in self.landings:
            ld.state = states.get(ld.room, Poll.WAITING)
            if ld.state is Poll.WAITING:
                keep.append(ld)
            elif ld.state is Poll.FAILED:
                for r in ld.regions:
                    r.deregister()
            else:
                ready.append(ld)
        self.landings = keep
        return ready

    def commit(self, ld: Landing) -> dict:
        record = self.metas.records.get(ld.meta, {})
        for r in ld.regions:
            r.deregister()
        ld.regions = []
        self.metas.release(ld.meta)
        return record

    def commit_later(self, ld: Landing) -> None:
        self.graveyard.append(ld)

    def sweep(self) -> int:
        n = 0
        while self.graveyard:
            self.commit(self.graveyard.pop())
            n += 1
        return n

    # ---- shadow copies for fault tolerance -------------------------------

    def shadow_of(self, rid: str) -> Optional[Region]:
        region = self.shadow.get(rid)
        if region is None:
            region = self.pool.register()  # clean: near miss, kept in shadow, drop_shadow gives it back
            if region is not None:
                self.shadow[rid] = region
        return region

    def drop_shadow(self, rid: str) -> None:
        region = self.shadow.pop(rid, None)
        if region:
            region.deregister()

    def reserve_meta(self, rids: list[str]) -> dict[str, int]:
        table: dict[str, int] = {}
        for rid in rids:
            i = self.metas.acquire()  # clean: the table is the caller's
            if i is None:
                break
            table[rid] = i
        return table

    def announce(self, rids: list[str], notify) -> int:
        table = self.reserve_meta(rids)  # leak: slots of peers that decline are not released
        accepted = 0
        for rid, i in table.items():
            if notify(rid, i):
                accepted += 1
                self.metas.release(i)
        return accepted
