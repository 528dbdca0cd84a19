"""Elastic agents: store connections, rank leases and the monitor that renews them."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections import deque

log = logging.getLogger("elastic")


class StoreConn:
    def __init__(self, host: str, port: int):
        self.sock = socket.create_connection((host, port))
        self.healthy = True

    def call(self, op: str, **kw):
        self.sock.sendall(json.dumps({"op": op, **kw}).encode() + b"\n")
        return json.loads(self.sock.makefile().readline())

    def shutdown(self) -> None:
        self.sock.close()


class StorePool:
    """Connections to the rendezvous store. dial() reuses idle ones and is bounded by ``limit``."""

    def __init__(self, host: str, port: int, limit: int):
        self.host, self.port = host, port
        self._idle: deque[StoreConn] = deque()
        self._slots = threading.Semaphore(limit)
        self._mu = threading.Lock()

    def dial(self) -> StoreConn:
        self._slots.acquire()  # clean: near miss, released by hang_up() with the connection, or when connecting fails
        with self._mu:
            if self._idle:
                return self._idle.pop()  # clean: returned to the caller
        try:
            return StoreConn(self.host, self.port)
        except OSError:
            self._slots.release()
            raise

    def try_dial(self) -> StoreConn | None:
        if not self._slots.acquire(blocking=False):  # leak: the slot is kept when no idle connection exists
            return None
        with self._mu:
            if not self._idle:
                return None
            return self._idle.pop()  # clean: returned to the caller

    def hang_up(self, conn: StoreConn) -> None:
        if conn.healthy:
            with self._mu:
                self._idle.append(conn)
        else:
            conn.shutdown()
        self._slots.release()

    @contextlib.contextmanager
    def session(self):
        conn = self.dial()  # clean: hung up in finally
        try:
            yield conn
        except ConnectionError:
            conn.healthy = False
            raise
        finally:
            self.hang_up(conn)


class RankLeases:
    """Ranks of the current generation. Leases are kept by node until resign()."""

    def __init__(self, world: int):
        self._open = set(range(world))

    def enlist(self) -> int | None:
        if not self._open:
            return None
        rank = min(self._open)
        self._open.discard(rank)
        return rank

    def resign(self, rank: int) -> None:
        self._open.add(rank)


class Agent:
    def __init__(self, pool: StorePool, ranks: RankLeases, node: str):
        self.pool = pool
        self.ranks = ranks
        self.node = node
        self.members: dict[str, int] = {}
        self.watch: StoreConn | None = None
        self.generation = 0

    def join(self, node: str) -> int | None:
        if node in self.members:
            return self.members[node]
        rank = self.ranks.enlist()  # clean: near miss, kept in members only for new nodes, leave() resigns it
        if rank is None:
            return None
        self.members[node] = rank
        return rank

    def leave(self, node: str) -> None:
        rank = self.members.pop(node, None)
        if rank is not None:
            self.ranks.resign(rank)

    def join_confirmed(self, node: str) -> int | None:
        if node in self.members:
            return self.members[node]
        rank = self.ranks.enlist()  # leak: not resigned when the store refuses the node
        if rank is None:
            return None
        with self.pool.session() as conn:  # clean: context manager
            reply = conn.call("join", node=node, rank=rank)
        if not reply.get("ok"):
            log.warning("store refused %s", node)
            return None
        self.members[node] = rank
        return rank

    def publish(self, key: str, value) -> bool:
        conn = self.pool.dial()  # leak: not hung up when the stored generation is newer
        reply = conn.call("get", key="generation")
        if reply["value"] > self.generation:
            return False
        conn.call("set", key=key, value=value)
        self.pool.hang_up(conn)
        return True

    def fetch(self, key: str, tries: int = 5):
        for i in range(tries):
            conn = self.pool.dial()  # leak: lost when ConnectionError is caught and the loop goes on
            try:
                value = conn.call("get", key=key)["value"]
            except ConnectionError:
                conn.healthy = False
                time.sleep(0.1 * (i + 1))
                continue
            self.pool.hang_up(conn)
            return value
        return None

    def fetch_many(self, keys: list[str]) -> dict:
        found = {}
        conn = self.pool.dial()  # clean: near miss, the `continue` and the caught error both end in the finally
        try:
            for k in keys:
                reply = conn.call("get", key=k)
                if "value" not in reply:
                    continue
                found[k] = reply["value"]
        except ConnectionError:
            conn.healthy = False
        finally:
            self.pool.hang_up(conn)
        return found

    # -- watching ---------------------------------------------------------------

    def start_watch(self) -> None:
        if self.watch is None:
            self.watch = self.pool.dial()  # clean: kept in self.watch, which stop_watch() hangs up

    def stop_watch(self) -> None:
        conn, self.watch = self.watch, None
        if conn is not None:
            self.pool.hang_up(conn)

    async def heartbeat(self, period: float, beats: int) -> int:
        sent = 0
        conn = await asyncio.to_thread(self.pool.dial)  # leak: hung up only when every beat was answered
        for _ in range(beats):
            reply = await asyncio.to_thread(conn.call, "beat", node=self.node)
            if not reply.get("ok"):
                return sent
            sent += 1
            await asyncio.sleep(period)
        self.pool.hang_up(conn)
        return sent
