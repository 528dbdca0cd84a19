"""Elastic rendezvous client: pooled connections to the key-value store, leases on ranks."""
from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from typing import Any, AsyncIterator, Callable


class StoreBusy(Exception):
    pass


class ConnPool:
    """Sockets to one store endpoint; `limit` bounds how many are open."""

    def __init__(self, host: str, port: int, limit: int) -> None:
        self.host, self.port = host, port
        self.limit = limit
        self.open_count = 0
        self._spare: set[socket.socket] = set()

    def connect(self) -> socket.socket:
        while self._spare:
            s = self._spare.pop()  # clean: near miss, a dead one is closed and uncounted, a live one is returned
            if s.fileno() >= 0 and not s._closed:
                return s
            s.close()
            self.open_count -= 1
        if self.open_count >= self.limit:
            raise StoreBusy(f"{self.open_count} connections to {self.host}")
        sock = socket.create_connection((self.host, self.port), timeout=10)  # clean: returned to the caller
        self.open_count += 1
        return sock

    def hand_in(self, s: socket.socket) -> None:
        self._spare.add(s)

    def scrap(self, s: socket.socket) -> None:
        s.close()
        self.open_count -= 1


def _ask(s: socket.socket, req: dict[str, Any]) -> dict[str, Any]:
    s.sendall(json.dumps(req).encode() + b"\n")
    with s.makefile() as f:  # clean: context manager
        return json.loads(f.readline())


class StoreClient:
    def __init__(self, pool: ConnPool) -> None:
        self.pool = pool
        self.watchers: dict[str, socket.socket] = {}

    def get(self, key: str) -> Any:
        s = self.pool.connect()  # clean: handed in or scrapped on each way
        try:
            out = _ask(s, {"op": "get", "key": key})
        except OSError:
            self.pool.scrap(s)
            raise
        self.pool.hand_in(s)
        return out.get("value")

    def compare_set(self, key: str, want: Any, new: Any) -> bool:
        s = self.pool.connect()  # leak: a conflict returns before hand_in
        reply = _ask(s, {"op": "cas", "key": key, "want": want, "new": new})
        if reply.get("conflict"):
            return False
        self.pool.hand_in(s)
        return True

    def add(self, key: str, n: int, tries: int = 5) -> int:
        last: Exception | None = None
        for i in range(tries):
            s = self.pool.connect()  # leak: the retry after an OSError takes another connection, this one is not scrapped
            try:
                value = _ask(s, {"op": "add", "key": key, "n": n})["value"]
            except OSError as e:
                last = e
                time.sleep(random.random() * 2 ** i)
                continue
            self.pool.hand_in(s)
            return value
        raise RuntimeError(f"add {key} failed") from last

    def wait(self, keys: list[str], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        s = self.pool.connect()  # clean: near miss, the returns in the loop pass the finally
        try:
            while time.monotonic() < deadline:
                if all(_ask(s, {"op": "has", "key": k}).get("has") for k in keys):
                    return True
                time.sleep(0.05)
            return False
        finally:
            self.pool.hand_in(s)

    def watch(self, key: str) -> None:
        if key in self.watchers:
            return
        s = self.pool.connect()  # clean: kept in self.watchers, scrapped by unwatch
        _ask(s, {"op": "watch", "key": key})
        self.watchers[key] = s

    def unwatch(self, key: str) -> None:
        s = self.watchers.pop(key, None)
        if s is not None:
            self.pool.scrap(s)

    def rename_watch(self, old: str, new: str) -> None:
        s = self.watchers.pop(old)
        _ask(s, {"op": "rewatch", "key": new})
        self.unwatch(new)
        self.watchers[new] = s


class RankTable:
    """Ranks for the members of a round; a vacancy is filled from the lowest number."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.taken: dict[int, str] = {}
        self._lock = asyncio.Lock()

    async def assign(self, node: str) -> int | None:
        async with self._lock:
            for r in range(self.world):
                if r not in self.taken:
                    self.taken[r] = node
                    return r
        return None

    def resign(self, rank: int) -> None:
        self.taken.pop(rank, None)

    @contextlib.asynccontextmanager
    async def member(self, node: str) -> AsyncIterator[int | None]:
        rank = await self.assign(node)  # clean: resigned in finally
        try:
            yield rank
        finally:
            if rank is not None:
                self.resign(rank)


class Rendezvous:
    def __init__(self, table: RankTable, min_nodes: int) -> None:
        self.table = table
        self.min_nodes = min_nodes
        self.joined: dict[str, list[int]] = {}
        self.gate = asyncio.Semaphore(16)

    async def join(self, node: str, local: int) -> list[int]:
        """One rank for each local process, all or none."""
        ranks: list[int] = []
        for _ in range(local):
            r = await self.table.assign(node)  # leak: all-or-none fails to resign the ranks of a node that does not fit
            if r is None:
                return []
            ranks.append(r)
        self.joined[node] = ranks
        return ranks

    async def leave(self, node: str) -> None:
        for r in self.joined.pop(node, []):
            self.table.resign(r)

    async def barrier(self, poll: Callable[[], Any]) -> bool:
        await self.gate.acquire()  # leak: too few nodes returns False without a release
        if len(self.joined) < self.min_nodes:
            return False
        while not poll():
            await asyncio.sleep(0.1)
        self.gate.release()
        return True

    async def heartbeat(self, ping: Callable[[str], bool]) -> list[str]:
        lost = []
        async with self.gate:
            for node in list(self.joined):
                if ping(node):
                    continue
                lost.append(node)
                await self.leave(node)
        return lost

    async def spare_run(self, node: str, body: Callable[[int], Any]) -> Any:
        async with self.table.member(node) as rank:  # clean: async context manager
            if rank is None:
                return None
            return body(rank)
