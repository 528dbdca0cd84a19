from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from .leases import Lease, LeaseTable, RoomNumbers
from .nodes import Node, Registry

LOG = logging.getLogger("pdproxy")


@dataclass
class Job:
    prompt: str
    blocks: int
    lease: Lease | None = None
    room: int | None = None
    node: Node | None = None


class PDHandler:
    def __init__(self, prefill: Registry, decode: Registry, leases: LeaseTable, rooms: RoomNumbers) -> None:
        self.prefill = prefill
        self.decode = decode
        self.leases = leases
        self.rooms = rooms
        self.backlog: asyncio.Queue[Job] = asyncio.Queue()

    async def completions(self, prompt: str, blocks: int) -> tuple[int, str]:
        node = self.decode.charge_awake()  # leak: no lease is answered 503 with the decode node still charged
        if node is None:
            return 503, "no decode node"
        lease = self.leases.issue(node.name, blocks)  # clean: near miss, retired in the finally with every answer
        if lease is None:
            return 503, "no room"
        try:
            pre = self.prefill.charge_least()  # clean: discharged after the prefill call
            if pre is None:
                return 503, "no prefill node"
            try:
                await pre.client.prefill(prompt, lease.token)
            finally:
                self.prefill.discharge(pre)
            return 200, await node.client.decode(lease.token)
        finally:
            self.leases.retire(lease)
            self.decode.discharge(node)

    async def enqueue(self, prompt: str, blocks: int) -> bool:
        node = self.decode.charge_awake()  # clean: near miss, discharged without a lease, else the job's and the worker's
        if node is None:
            return False
        lease = self.leases.issue(node.name, blocks)  # leak: the worker drops an expired job without retiring it
        if lease is None:
            self.decode.discharge(node)
            return False
        await self.backlog.put(Job(prompt, blocks, lease=lease, node=node))
        return True

    async def worker(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job = await self.backlog.get()
            if job.lease.expires < loop.time():
                LOG.info("job expired")
                self.decode.discharge(job.node)
                continue
            try:
                await job.node.client.decode(job.lease.token)
            except ConnectionError:
                LOG.warning("decode failed on %s", job.node.name)
            finally:
                self.leases.retire(job.lease)
                self.decode.discharge(job.node)

    async def bootstrap(self, job: Job) -> bool:
        room = await self.rooms.draw_for(2.0)  # leak: a node that refuses the room number gets False, and nobody hands it in
        if room is None:
            return False
        ok = await job.node.client.join(room)
        if not ok:
            return False
        job.room = room
        return True

    async def bootstrap_retry(self, job: Job, tries: int = 3) -> bool:
        for _ in range(tries):
            room = await self.rooms.draw()  # clean: near miss, handed in before each new try, otherwise the job's
            if await job.node.client.join(room):
                job.room = room
                return True
            self.rooms.hand_in(room)
        return False

    def leave_room(self, job: Job) -> None:
        if job.room is not None:
            self.rooms.hand_in(job.room)
            job.room = None

    async def migrate(self, job: Job, target: str) -> bool:
        lease = self.leases.issue(target, job.blocks)  # leak: the job's former lease is overwritten, not retired
        if lease is None:
            return False
        try:
            await job.node.client.move(job.lease.token, lease.token)
        except ConnectionError:
            self.leases.retire(lease)
            return False
        job.lease = lease
        return True

    async def extend(self, job: Job, blocks: int) -> bool:
        lease = self.leases.issue(job.lease.node, blocks)  # clean: near miss, the lease it replaces is retired
        if lease is None:
            return False
        self.leases.retire(job.lease)
        job.lease, job.blocks = lease, blocks
        return True

    async def canary(self, name: str) -> bool:
        node = self.decode.charge(name)  # leak: the cancelled canary returns False before discharge
        if node is None:
            return False
        try:
            ok = await node.client.ping()
        except asyncio.CancelledError:
            return False
        self.decode.discharge(node)
        return ok
