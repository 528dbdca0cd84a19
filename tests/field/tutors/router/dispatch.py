"""Sends requests to replicas under their quotas."""
import asyncio
from typing import Awaitable, Callable, Optional

from .quotas import ReplicaQuota, Ticket, least_loaded, reserve_group

Call = Callable[[str, bytes], Awaitable[Optional[bytes]]]


class Dispatcher:
    def __init__(self, quotas: list[ReplicaQuota], call: Call) -> None:
        self.quotas = quotas
        self.call = call
        self.running: dict[str, tuple[Ticket, asyncio.Task]] = {}

    async def send(self, body: bytes) -> Optional[bytes]:
        ticket = least_loaded(self.quotas)  # leak: an empty reply returns before the punch
        if ticket is None:
            return None
        reply = await self.call(ticket.quota.name, body)
        if not reply:
            return None
        ticket.punch()
        return reply

    async def send_waiting(self, quota: ReplicaQuota, body: bytes) -> Optional[bytes]:
        async with quota.admitted(2.0) as ok:  # clean: near miss, returns pass the context manager
            if not ok:
                return None
            return await self.call(quota.name, body)

    async def hedge(self, body: bytes) -> Optional[bytes]:
        first = least_loaded(self.quotas)  # clean: near miss, punched also when there is no second
        if first is None:
            return None
        second = least_loaded(self.quotas)  # clean: in holders, punched in finally
        holders = [t for t in (first, second) if t is not None]
        try:
            replies = await asyncio.gather(*(self.call(t.quota.name, body) for t in holders))
            return next((r for r in replies if r), None)
        finally:
            for ticket in holders:
                ticket.punch()

    async def failover(self, body: bytes) -> Optional[bytes]:
        ticket = least_loaded(self.quotas)  # clean: near miss, punched in the handler before rebinding
        if ticket is None:
            return None
        try:
            reply = await self.call(ticket.quota.name, body)
        except ConnectionError:
            ticket.punch()
            ticket = least_loaded(self.quotas)  # leak: the second failure returns None unpunched
            if ticket is None:
                return None
            try:
                reply = await self.call(ticket.quota.name, body)
            except ConnectionError:
                return None
        ticket.punch()
        return reply

    def start(self, request_id: str, body: bytes) -> bool:
        if request_id in self.running:
            return False
        ticket = least_loaded(self.quotas)  # clean: near miss, stays in running until collect or cancel
        if ticket is None:
            return False
        task = asyncio.ensure_future(self.call(ticket.quota.name, body))
        self.running[request_id] = (ticket, task)
        return True

    async def collect(self, request_id: str) -> Optional[bytes]:
        ticket, task = self.running.pop(request_id)
        try:
            return await task
        finally:
            ticket.punch()

    def cancel(self, request_id: str) -> None:
        ticket, task = self.running.pop(request_id)
        task.cancel()
        ticket.punch()

    async def broadcast(self, body: bytes) -> int:
        tickets = reserve_group(self.quotas)  # leak: only replicas that answer are punched
        answered = 0
        for ticket in tickets:
            if await self.call(ticket.quota.name, body):
                answered += 1
                ticket.punch()
        return answered
