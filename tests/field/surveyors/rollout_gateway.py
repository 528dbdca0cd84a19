"""Asynchronous rollout generation against a fleet of inference servers."""
from __future__ import annotations

import asyncio
import heapq
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Optional

logger = logging.getLogger(__name__)


class ServerGone(Exception):
    pass


@dataclass(order=True)
class ServerLoad:
    in_flight: int
    address: str = field(compare=False)
    draining: bool = field(default=False, compare=False)


@dataclass
class RolloutRequest:
    uid: str
    prompt_ids: list[int]
    max_turns: int
    server: Optional[ServerLoad] = None
    turns: list[list[int]] = field(default_factory=list)


class LeastLoadedBalancer:
    def __init__(self, addresses: list[str], limit: int) -> None:
        self.limit = limit
        self._heap = [ServerLoad(0, a) for a in addresses]
        self._by_address = {s.address: s for s in self._heap}
        self._wakeup = asyncio.Condition()

    async def acquire_server(self) -> ServerLoad:
        async with self._wakeup:
            await self._wakeup.wait_for(lambda: self._heap[0].in_flight < self.limit)
            server = self._heap[0]
            server.in_flight += 1
            heapq.heapify(self._heap)
            return server

    def try_acquire_server(self, address: str) -> Optional[ServerLoad]:
        server = self._by_address[address]
        if server.draining or server.in_flight >= self.limit:
            return None
        server.in_flight += 1
        heapq.heapify(self._heap)
        return server

    async def release_server(self, server: ServerLoad) -> None:
        async with self._wakeup:
            server.in_flight -= 1
            heapq.heapify(self._heap)
            self._wakeup.notify()

    @asynccontextmanager
    async def using_server(self) -> AsyncIterator[ServerLoad]:
        server = await self.acquire_server()  # clean: near miss, the finally gives it back whatever the body does
        try:
            yield server
        finally:
            await self.release_server(server)


class RolloutGateway:
    def __init__(self, balancer: LeastLoadedBalancer, client: Any, sticky: bool = True) -> None:
        self.balancer = balancer
        self.client = client
        self.sticky = sticky
        self.active: dict[str, RolloutRequest] = {}
        self.warm: dict[str, ServerLoad] = {}

    async def generate(self, prompt_ids: list[int]) -> Optional[list[int]]:
        server = await self.balancer.acquire_server()  # leak: ServerGone is answered with None and the slot stays taken
        try:
            output = await self.client.generate(server.address, prompt_ids)
        except ServerGone:
            logger.warning("server %s went away", server.address)
            return None
        await self.balancer.release_server(server)
        return output

    async def generate_cancellable(self, prompt_ids: list[int]) -> Optional[list[int]]:
        server = await self.balancer.acquire_server()  # clean: near miss, both handlers and the normal end release
        try:
            output = await self.client.generate(server.address, prompt_ids)
        except asyncio.CancelledError:
            await self.balancer.release_server(server)
            raise
        except ServerGone:
            await self.balancer.release_server(server)
            return None
        await self.balancer.release_server(server)
        return output

    async def score(self, sequences: list[list[int]]) -> list[float]:
        async with self.balancer.using_server() as server:  # clean: the context manager releases
            return [await self.client.logprob(server.address, seq) for seq in sequences]

    async def generate_with_retry(self, prompt_ids: list[int], attempts: int) -> Optional[list[int]]:
        server: Optional[ServerLoad] = None
        try:
            for _ in range(attempts):
                server = await self.balancer.acquire_server()  # leak: a retry rebinds server, finally releases only the last one
                try:
                    return await self.client.generate(server.address, prompt_ids)
                except ServerGone:
                    await asyncio.sleep(0.5)
            return None
        finally:
            if server is not None:
                await self.balancer.release_server(server)

    async def begin(self, request: RolloutRequest) -> None:
        if request.uid in self.active:
            raise KeyError(request.uid)
        request.server = await self.balancer.acquire_server()  # clean: near miss, held by the request in active until end or abort_all
        self.active[request.uid] = request

    async def next_turn(self, uid: str) -> list[int]:
        request = self.active[uid]
        assert request.server is not None
        history = [tok for turn in request.turns for tok in turn]
        output = await self.client.generate(request.server.address, request.prompt_ids + history)
        request.turns.append(output)
        if len(request.turns) >= request.max_turns:
            await self.end(uid)
        return output

    async def migrate(self, uid: str, address: str) -> bool:
        request = self.active[uid]
        target = self.balancer.try_acquire_server(address)  # clean: near miss, takes the place of the old server, which is released
        if target is None:
            return False
        old, request.server = request.server, target
        if old is not None:
            await self.balancer.release_server(old)
        return True

    async def rebalance(self, uids: list[str], address: str) -> int:
        moved = 0
        for uid in uids:
            request = self.active.get(uid)
            target = self.balancer.try_acquire_server(address)  # leak: the continue for a request that has ended drops the slot
            if target is None:
                break
            if request is None:
                continue
            if request.server is not None:
                await self.balancer.release_server(request.server)
            request.server = target
            moved += 1
        return moved

    async def end(self, uid: str) -> None:
        request = self.active.pop(uid, None)
        if request is None or request.server is None:
            return
        await self.balancer.release_server(request.server)
        request.server = None

    async def abort_all(self) -> None:
        for uid in list(self.active):
            await self.end(uid)

    async def warm_prefix(self, key: str, prefix: list[int]) -> None:
        server = await self.balancer.acquire_server()  # leak: warm is a registry nobody empties, cool only deletes the entry
        await self.client.prefill(server.address, prefix)
        self.warm[key] = server

    def cool(self, key: str) -> None:
        if key in self.warm:
            del self.warm[key]

    async def weight_sync(self, addresses: list[str], version: int) -> bool:
        held: list[ServerLoad] = []
        for address in addresses:
            server = self.balancer.try_acquire_server(address)  # clean: near miss, those held so far are released when one is busy
            if server is None:
                for other in held:
                    await self.balancer.release_server(other)
                return False
            held.append(server)
        await asyncio.gather(*(self.client.update(s.address, version) for s in held))
        while held:
            await self.balancer.release_server(held.pop())
        return True

    async def probe(self, address: str) -> bool:
        server = self.balancer.try_acquire_server(address)  # leak: an unhealthy answer returns before the release
        if server is None:
            return False
        healthy = await self.client.health(server.address)
        if not healthy:
            server.draining = True
            return False
        await self.balancer.release_server(server)
        return True
