"""In-flight quotas of engine replicas."""
import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator, Optional


class Ticket:
    def __init__(self, quota: "ReplicaQuota") -> None:
        self.quota = quota
        self.spent = False

    def punch(self) -> None:
        if not self.spent:
            self.spent = True
            self.quota.inflight -= 1
            self.quota.room.set()


class ReplicaQuota:
    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.inflight = 0
        self.room = asyncio.Event()

    def issue(self) -> Optional[Ticket]:
        if self.inflight >= self.limit:
            return None
        self.inflight += 1
        return Ticket(self)

    async def issue_waiting(self, patience: float) -> Optional[Ticket]:
        while True:
            ticket = self.issue()  # clean: near miss, loops again only on None
            if ticket is not None:
                return ticket
            self.room.clear()
            try:
                await asyncio.wait_for(self.room.wait(), patience)
            except asyncio.TimeoutError:
                return None

    @asynccontextmanager
    async def admitted(self, patience: float) -> AsyncIterator[bool]:
        ticket = await self.issue_waiting(patience)  # clean: punched in finally
        try:
            yield ticket is not None
        finally:
            if ticket is not None:
                ticket.punch()


def least_loaded(quotas: list[ReplicaQuota]) -> Optional[Ticket]:
    """A ticket at the emptiest replica that issues one."""
    for quota in sorted(quotas, key=lambda q: q.inflight):
        ticket = quota.issue()  # clean: handed to the caller
        if ticket:
            return ticket
    return None


def reserve_group(quotas: list[ReplicaQuota]) -> list[Ticket]:
    """One ticket at every replica, or an empty list."""
    tickets = [quota.issue() for quota in quotas]  # leak: issued tickets are lost when one replica is full
    if None in tickets:
        return []
    return tickets
