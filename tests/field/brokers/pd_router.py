"""Router for prefill/decode disaggregation: picks a worker pair, a bootstrap room and load tokens."""
from __future__ import annotations

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, AsyncIterator, Awaitable, Callable

logger = logging.getLogger(__name__)

Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass
class Worker:
    url: str
    capacity: int
    load: int = 0
    healthy: bool = True

    def enter(self, cost: int) -> bool:
        if not self.healthy or self.load + cost > self.capacity:
            return False
        self.load += cost
        return True

    def leave(self, cost: int) -> None:
        self.load -= cost


class Rooms:
    """Bootstrap rooms are ports on the prefill side, so there is a fixed number of them."""

    def __init__(self, base: int, n: int) -> None:
        self._free = set(range(base, base + n))

    def book(self) -> int | None:
        return self._free.pop() if self._free else None

    def vacate(self, room: int) -> None:
        self._free.add(room)


@dataclass
class Route:
    prefill: Worker
    decode: Worker
    room: int
    cost: int
    tags: list[str] = field(default_factory=list)


class PDRouter:
    def __init__(self, prefill: list[Worker], decode: list[Worker], rooms: Rooms, post: Post) -> None:
        self.prefill = prefill
        self.decode = decode
        self.rooms = rooms
        self.post = post
        self.routes: dict[str, Route] = {}
        self.drained: dict[str, int] = {}

    def _pick(self, workers: list[Worker], cost: int) -> Worker | None:
        for w in sorted(workers, key=lambda w: w.load):
            if w.enter(cost):  # clean: near miss, entered worker goes to the caller and a refusal counts nothing
                return w
        return None

    def route(self, rid: str, cost: int) -> Route | None:
        if rid in self.routes:
            return self.routes[rid]
        p = self._pick(self.prefill, cost)  # leak: a missing room gives back the decode side only
        if p is None:
            return None
        d = self._pick(self.decode, cost)  # clean: near miss, left again without a room, else held by the route
        if d is None:
            p.leave(cost)
            return None
        room = self.rooms.book()  # clean: near miss, lives in the route until done
        if room is None:
            d.leave(cost)
            return None
        self.routes[rid] = Route(p, d, room, cost)
        return self.routes[rid]

    def done(self, rid: str) -> None:
        r = self.routes.pop(rid, None)
        if r is None:
            return
        r.prefill.leave(r.cost)
        r.decode.leave(r.cost)
        self.rooms.vacate(r.room)

    def reroute_decode(self, rid: str) -> bool:
        r = self.routes.get(rid)
        if r is None:
            return False
        new = self._pick(self.decode, r.cost)  # leak: the worker that was in the route keeps its load
        if new is None:
            return False
        r.decode = new
        r.tags.append("rerouted")
        return True

    def reroute_prefill(self, rid: str) -> bool:
        r = self.routes.get(rid)
        if r is None:
            return False
        new = self._pick(self.prefill, r.cost)  # clean: near miss, the old worker is left before the route changes
        if new is None:
            return False
        r.prefill.leave(r.cost)
        r.prefill = new
        return True

    async def send(self, rid: str, body: dict[str, Any]) -> dict[str, Any] | None:
        r = self.route(rid, len(body.get("tokens", ())))
        if r is None:
            return None
        payload = {**body, "bootstrap_room": r.room}
        try:
            _, out = await asyncio.gather(self.post(r.prefill.url, payload), self.post(r.decode.url, payload))
            return out
        finally:
            self.done(rid)

    async def prefill_only(self, body: dict[str, Any]) -> bool:
        cost = len(body.get("tokens", ()))
        w = self._pick(self.prefill, cost)  # leak: the handled timeout returns False without the leave
        if w is None:
            return False
        try:
            await asyncio.wait_for(self.post(w.url, body), timeout=5.0)
        except asyncio.TimeoutError:
            logger.warning("prefill on %s timed out", w.url)
            return False
        w.leave(cost)
        return True

    async def decode_only(self, body: dict[str, Any]) -> dict[str, Any]:
        cost = len(body.get("tokens", ()))
        w = self._pick(self.decode, cost)  # clean: near miss, timeout and success both pass the finally
        if w is None:
            return {"error": "overloaded"}
        try:
            return await asyncio.wait_for(self.post(w.url, body), timeout=5.0)
        except asyncio.TimeoutError:
            return {"error": "timeout"}
        finally:
            w.leave(cost)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[int | None]:
        num = self.rooms.book()  # clean: vacated on the way out unless None
        try:
            yield num
        finally:
            if num is not None:
                self.rooms.vacate(num)

    async def handshake(self, url: str) -> bool:
        async with self.room() as num:  # clean: near miss, the context vacates the room on the early return
            if num is None:
                return False
            reply = await self.post(url, {"room": num})
            return bool(reply.get("ok"))

    async def probe(self, url: str, rounds: int) -> int:
        good = 0
        for _ in range(rounds):
            num = self.rooms.book()  # leak: a reply that is not ok continues past the vacate
            if num is None:
                break
            reply = await self.post(url, {"room": num, "probe": True})
            if not reply.get("ok"):
                continue
            good += 1
            self.rooms.vacate(num)
        return good

    def drain(self, worker: Worker) -> None:
        worker.healthy = False
        for rid, r in list(self.routes.items()):
            if r.decode is worker:
                self.done(rid)

    def shuffle_test(self, n: int) -> list[int]:
        nums: list[int] = []
        for _ in range(n):
            num = self.rooms.book()  # clean: near miss, the list is vacated after the shuffle
            if num is None:
                break
            nums.append(num)
        random.shuffle(nums)
        for num in nums:
            self.rooms.vacate(num)
        return nums


async def serve(router: PDRouter, bodies: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    tasks = [asyncio.create_task(router.send(f"r{i}", b)) for i, b in enumerate(bodies)]
    return list(await asyncio.gather(*tasks))
