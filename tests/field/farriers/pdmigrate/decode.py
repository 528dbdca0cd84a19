from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from .blocks import BlockLease, BlockPool
from .link import Channel, TransferLink


@dataclass
class Incoming:
    rid: str
    tokens: int
    src: str
    lease: BlockLease | None = None
    chan: Channel | None = None
    deadline: float = 0.0
    out: list[int] = field(default_factory=list)


class DecodeNode:
    def __init__(self, pool: BlockPool, link: TransferLink, headroom: int, ttl: float = 30.0) -> None:
        self.pool = pool
        self.link = link
        self.headroom = headroom
        self.ttl = ttl
        self.waiting: deque[Incoming] = deque()
        self.landing: dict[str, Incoming] = {}
        self.active: dict[str, Incoming] = {}

    def accept(self) -> int:
        n = 0
        while self.waiting:
            inc = self.waiting[0]
            inc.lease = self.pool.reserve(inc.tokens + self.headroom)  # clean: near miss, surrendered when there is no channel and the head stays queued
            if inc.lease is None:
                break
            inc.chan = self.link.open_channel(inc.src)  # leak: expire drops a landing request with its lease surrendered and its channel open
            if inc.chan is None:
                self.pool.surrender(inc.lease)
                inc.lease = None
                break
            self.waiting.popleft()
            inc.deadline = time.monotonic() + self.ttl
            self.landing[inc.rid] = inc
            n += 1
        return n

    def on_landed(self, rid: str) -> None:
        inc = self.landing.pop(rid, None)
        if inc is None:
            return
        if inc.chan is not None:
            self.link.close_channel(inc.chan)
            inc.chan = None
        self.active[rid] = inc

    def expire(self) -> int:
        now = time.monotonic()
        late = [r for r, inc in self.landing.items() if inc.deadline < now]
        for rid in late:
            inc = self.landing.pop(rid)
            if inc.lease is not None:
                self.pool.surrender(inc.lease)
        return len(late)

    def extend(self, rid: str) -> bool:
        inc = self.active[rid]
        more = self.pool.reserve(self.pool.block_size)  # clean: near miss, its ids are folded into the lease of the request
        if more is None or inc.lease is None:
            if more is not None:
                self.pool.surrender(more)
            return False
        inc.lease.ids.extend(more.ids)
        inc.lease.tokens += more.tokens
        return True

    def preempt(self, rid: str) -> None:
        inc = self.active.pop(rid)
        if inc.lease is not None:
            self.pool.surrender(inc.lease)
            inc.lease = None
        self.waiting.appendleft(inc)

    def defrag(self, rid: str, copy) -> bool:
        inc = self.active[rid]
        if inc.lease is None:
            return False
        fresh = self.pool.reserve(inc.lease.tokens)  # leak: the fresh lease replaces the fragmented one, which is not surrendered
        if fresh is None:
            return False
        copy(inc.lease.ids, fresh.ids)
        inc.lease = fresh
        return True

    def finish(self, rid: str) -> list[int]:
        inc = self.active.pop(rid)
        if inc.lease is not None:
            self.pool.surrender(inc.lease)
        return inc.out
