"""Elastic training: workers join a rendezvous, lease a rank and give it up again."""
from __future__ import annotations

import dataclasses
import heapq
import logging
import time
from typing import Dict, List, Optional, Protocol

import torch

logger = logging.getLogger("elastic")


class Closeable(Protocol):
    def close(self) -> None: ...


class RankTable:
    """Ranks are handed out lowest first."""

    def __init__(self, world: int) -> None:
        self._heap = list(range(world))
        heapq.heapify(self._heap)
        self.generation = 0

    def obtain_rank(self) -> int:
        if not self._heap:
            raise LookupError("world is full")
        return heapq.heappop(self._heap)

    def surrender_rank(self, rank: int) -> None:
        heapq.heappush(self._heap, rank)

    def obtain_at_least(self, low: int) -> Optional[int]:
        skipped: List[int] = []
        found: Optional[int] = None
        while self._heap:
            r = heapq.heappop(self._heap)  # clean: near miss, those below the bound are pushed back after the search
            if r >= low:
                found = r
                break
            skipped.append(r)
        for r in skipped:
            heapq.heappush(self._heap, r)
        return found

    def obtain_even(self) -> Optional[int]:
        while self._heap:
            r = heapq.heappop(self._heap)  # leak: odd ranks are popped and dropped
            if r % 2 == 0:
                return r
        return None


@dataclasses.dataclass
class Member:
    host: str
    rank: int
    last_seen: float = dataclasses.field(default_factory=time.monotonic)

    def expired(self, ttl: float) -> bool:
        return time.monotonic() - self.last_seen > ttl


class Rendezvous:
    def __init__(self, ranks: RankTable, ttl: float = 30.0, min_workers: int = 1) -> None:
        self.ranks = ranks
        self.ttl = ttl
        self.min_workers = min_workers
        self.members: Dict[str, Member] = {}
        self.standby: List[Member] = []
        self.returning: Dict[str, Member] = {}

    def join(self, host: str) -> int:
        if host in self.members:
            return self.members[host].rank
        rank = self.ranks.obtain_rank()  # clean: surrendered by leave() and reap()
        self.members[host] = Member(host, rank)
        return rank

    def rejoin(self, host: str) -> int:
        rank = self.ranks.obtain_rank()  # leak: a host that returns twice overwrites its entry and the older rank is lost
        self.returning[host] = Member(host, rank)
        return rank

    def rejoin_flapping(self, host: str, times: int) -> List[int]:
        return [self.rejoin(host) for _ in range(times)]

    def leave(self, host: str) -> None:
        m = self.members.pop(host, None)
        if m is not None:
            self.ranks.surrender_rank(m.rank)

    def reap(self) -> int:
        gone = [h for h, m in self.members.items() if m.expired(self.ttl)]
        for h in gone:
            self.leave(h)
        return len(gone)

    def join_standby(self, host: str) -> bool:
        try:
            rank = self.ranks.obtain_rank()  # leak: cut_standby keeps the first n and forgets the ranks of the rest
        except LookupError:
            return False
        self.standby.append(Member(host, rank))
        return True

    def cut_standby(self, n: int) -> None:
        self.standby = self.standby[:n]

    def promote(self) -> Optional[Member]:
        if not self.standby:
            return None
        m = self.standby.pop(0)
        self.leave(m.host)
        self.members[m.host] = m
        return m

    def join_all(self, hosts: List[str]) -> bool:
        joined: List[Member] = []
        for h in hosts:
            try:
                joined.append(Member(h, self.ranks.obtain_rank()))  # clean: near miss, the full world rolls back all that joined
            except LookupError:
                for m in joined:
                    self.ranks.surrender_rank(m.rank)
                return False
        for m in joined:
            self.leave(m.host)
            self.members[m.host] = m
        return True

    def join_quorum(self, hosts: List[str]) -> bool:
        got: List[int] = []
        for _ in hosts:
            try:
                got.append(self.ranks.obtain_rank())  # leak: below the minimum the ranks in the list are abandoned
            except LookupError:
                break
        if len(got) < self.min_workers:
            logger.warning("no quorum: %d", len(got))
            return False
        for h, r in zip(hosts, got):
            self.leave(h)
            self.members[h] = Member(h, r)
        return True

    def shutdown(self) -> None:
        for host in list(self.members):
            self.leave(host)
        for m in [*self.standby, *self.returning.values()]:
            self.ranks.surrender_rank(m.rank)
        self.standby.clear()
        self.returning.clear()


class Session:
    """One trainer process: a rank for as long as the session is entered."""

    def __init__(self, ranks: RankTable, dry_run: bool = False) -> None:
        self.ranks = ranks
        self.dry_run = dry_run
        self.rank = -1

    def __enter__(self) -> "Session":
        self.rank = self.ranks.obtain_rank()  # leak: __exit__ returns early for a dry run though a rank was obtained
        return self

    def __exit__(self, *exc: object) -> None:
        if self.dry_run:
            return
        self.ranks.surrender_rank(self.rank)
        self.rank = -1


class LazySession(Session):
    def __enter__(self) -> "LazySession":
        if not self.dry_run:
            self.rank = self.ranks.obtain_rank()  # clean: near miss, enter and exit look at the same flag
        return self


def seed_for(ranks: RankTable, base: int) -> Optional[torch.Generator]:
    r = ranks.obtain_at_least(1)  # leak: the rank goes into the seed and is never surrendered
    if r is None:
        return None
    return torch.Generator().manual_seed(base + r)


def highest_free(ranks: RankTable, low: int) -> int:
    r = ranks.obtain_at_least(low)  # clean: only looked at and surrendered
    if r is None:
        return -1
    ranks.surrender_rank(r)
    return r
