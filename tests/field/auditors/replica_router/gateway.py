from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional

from .quotas import QuotaExceeded, TenantQuota
from .replicas import Replica, ReplicaError, ReplicaSet


@dataclass
class StreamTicket:
    tenant: str
    replica: Replica
    units: int


class InferenceGateway:
    def __init__(self, replicas: ReplicaSet, quota: TenantQuota) -> None:
        self.replicas = replicas
        self.quota = quota
        self.streams: dict[str, StreamTicket] = {}
        self.parked: asyncio.Queue[StreamTicket] = asyncio.Queue()

    async def infer(self, tenant: str, payload: str) -> Optional[str]:
        try:
            with self.quota.charged(tenant, len(payload)):  # clean: near miss, every return below leaves through the context manager
                replica = self.replicas.assign_sticky(tenant)  # leak: an error of the replica is turned into None without an exit
                if replica is None:
                    return None
                answer = await replica.infer(payload)
                replica.exit()
                return answer
        except (QuotaExceeded, ReplicaError):
            return None

    async def infer_retry(self, payload: str, attempts: int) -> Optional[str]:
        for _ in range(attempts):
            replica = self.replicas.assign()  # clean: near miss, each attempt exits its replica in the finally
            if replica is None:
                await asyncio.sleep(0.01)
                continue
            try:
                return await replica.infer(payload)
            except ReplicaError:
                continue
            finally:
                replica.exit()
        return None

    async def race(self, payload: str) -> Optional[str]:
        pair = self.replicas.assign_two()  # leak: only the replica that answers is exited, the other one's place stays taken
        if pair is None:
            return None
        for replica in pair:
            try:
                answer = await replica.infer(payload)
            except ReplicaError:
                continue
            replica.exit()
            return answer
        return None

    def open_stream(self, rid: str, tenant: str, units: int) -> bool:
        if rid in self.streams:
            return False
        if not self.quota.charge(tenant, units):  # leak: with no replica free the stream is refused and the charge stands
            return False
        replica = self.replicas.assign()  # clean: near miss, moved into the ticket, which close_stream and resume_parked settle
        if replica is None:
            return False
        self.streams[rid] = StreamTicket(tenant, replica, units)
        return True

    def _settle(self, ticket: StreamTicket) -> None:
        ticket.replica.exit()
        self.quota.credit(ticket.tenant, ticket.units)

    def close_stream(self, rid: str) -> None:
        ticket = self.streams.pop(rid, None)
        if ticket is not None:
            self._settle(ticket)

    def park_stream(self, rid: str) -> None:
        ticket = self.streams.pop(rid, None)
        if ticket is not None:
            self.parked.put_nowait(ticket)

    async def resume_parked(self) -> None:
        while not self.parked.empty():
            ticket = self.parked.get_nowait()
            try:
                await ticket.replica.infer("resume")
            except ReplicaError:
                pass
            finally:
                self._settle(ticket)

    async def warm(self, tenants: list[str]) -> int:
        if not self.quota.charge_all(tenants, 1):  # leak: a tenant without a replica ends the loop and the tenants after it are not credited
            return 0
        warmed = 0
        for tenant in tenants:
            replica = self.replicas.assign()  # clean: near miss, exited again before the next tenant's turn
            if replica is None:
                break
            replica.exit()
            self.quota.credit(tenant, 1)
            warmed += 1
        return warmed

    async def probe(self, replica: Replica) -> bool:
        if not replica.enter():  # clean: near miss, cancellation and errors both come by the finally
            return False
        try:
            await replica.infer("ping")
            return True
        except (ReplicaError, asyncio.CancelledError):
            return False
        finally:
            replica.exit()
