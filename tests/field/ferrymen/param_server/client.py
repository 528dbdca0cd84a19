"""Pull and push of embedding rows."""
from __future__ import annotations

import array
import logging
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Iterable, Optional, Sequence

from .window import Pending, RequestWindow
from .wire import Connection, ConnectionPool

log = logging.getLogger("ps.client")

PULL, PUSH, STAT, SAVE = 1, 2, 3, 4


def encode_rows(rows: Sequence[int]) -> bytes:
    return array.array("Q", rows).tobytes()


def decode_floats(data: bytes) -> array.array:
    out = array.array("f")
    out.frombytes(data)
    return out


class Client:
    def __init__(self, pool: ConnectionPool, window: RequestWindow, servers: list[tuple[str, int]]) -> None:
        self.pool = pool
        self.window = window
        self.servers = servers
        self.workers = ThreadPoolExecutor(len(servers))
        self.sticky: dict[int, Connection] = {}
        self.flight: list[Pending] = []
        self.bytes_in = 0

    def home(self, row: int) -> tuple[str, int]:
        return self.servers[row % len(self.servers)]

    def pull(self, rows: Sequence[int]) -> dict[int, array.array]:
        out: dict[int, array.array] = {}
        for shard, endpoint in enumerate(self.servers):
            mine = [r for r in rows if r % len(self.servers) == shard]
            if not mine:
                continue
            conn = self.pool.lend(endpoint)  # clean: taken back in finally
            if conn is None:
                log.warning("no connection to %s", endpoint)
                continue
            try:
                data = conn.call(PULL, encode_rows(mine))
                self.bytes_in += len(data)
                if not data:
                    continue
                floats = decode_floats(data)
                width = len(floats) // len(mine)
                for i, r in enumerate(mine):
                    out[r] = floats[i * width:(i + 1) * width]
            finally:
                self.pool.take_back(conn)
        return out

    def push(self, rows: Sequence[int], grads: bytes, compress: bool = True) -> bool:
        endpoint = self.home(rows[0])
        conn = self.pool.greet(endpoint)  # leak: an empty acknowledgement returns without take_back
        if conn is None:
            return False
        body = encode_rows(rows) + (zlib.compress(grads) if compress else grads)
        ack = conn.call(PUSH, body)
        if not ack:
            log.error("push of %d rows to %s was not acknowledged", len(rows), endpoint)
            return False
        self.pool.take_back(conn)
        return True

    def alive(self) -> list[bool]:
        return [self.pool.greet(e, tries=1) is not None for e in self.servers]  # leak: only None-tested

    # a connection per shard, kept between calls ---------------------------------------------------------
    def stick(self, shard: int) -> Optional[Connection]:
        conn = self.sticky.get(shard)
        if conn is not None and not conn.broken:
            return conn
        if conn is not None:
            log.info("shard %d: the connection broke", shard)
            del self.sticky[shard]
        fresh = self.pool.lend(self.servers[shard])  # leak: a broken one is just deleted
        if fresh is not None:
            self.sticky[shard] = fresh
        return fresh

    def pull_sticky(self, row: int) -> Optional[array.array]:
        conn = self.stick(row % len(self.servers))  # clean: near miss, sticky goes on owning it
        if conn is None:
            return None
        return decode_floats(conn.call(PULL, encode_rows([row])))

    # requests in flight -----------------------------------------------------------------------------------
    def prefetch(self, rows: Iterable[int]) -> int:
        started = 0
        for row in rows:
            pending = self.window.open_request()  # clean: near miss, flight holds it until gather()
            pending.conn = self.pool.lend(self.home(row))  # leak: gather() ends the request only
            self.flight.append(pending)
            if pending.conn is not None:
                self.workers.submit(self._one, pending, row)
            started += 1
        return started

    def _one(self, pending: Pending, row: int) -> None:
        self.window.resolve(pending.rid, pending.conn.call(PULL, encode_rows([row])))

    def gather(self) -> list[array.array]:
        self.workers.shutdown(wait=True)
        self.workers = ThreadPoolExecutor(len(self.servers))
        got = []
        for pending in self.flight:
            if pending.reply:
                got.append(decode_floats(pending.reply))
            self.window.close_request(pending)
        self.flight = []
        return got

    def save(self, path: str) -> bool:
        """Asks every server to save; true if all of them did."""
        answers = []
        for endpoint in self.servers:
            conn = self.pool.lend(endpoint)  # clean: near miss, None means none lent, else taken back
            answers.append(conn is not None and conn.call(SAVE, path.encode()) == b"ok")
            if conn is not None:
                self.pool.take_back(conn)
        return all(answers)

    def watch(self, row: int, limit: int) -> list[array.array]:
        """The row's value again and again until it stops changing."""
        seen: list[array.array] = []
        pending = self.window.open_request()  # leak: the early return does not close the request
        conn = self.pool.lend(self.home(row))  # clean: taken back on both ways
        if conn is None:
            return seen
        for _ in range(limit):
            value = decode_floats(conn.call(PULL, encode_rows([row])))
            if seen and seen[-1] == value:
                break
            seen.append(value)
            self.window.resolve(pending.rid, value.tobytes())
        self.pool.take_back(conn)
        self.window.close_request(pending)
        return seen

    def fire(self, row: int, body: bytes) -> None:
        """One push whose answer nobody waits for."""
        pending: Optional[Pending] = None

        def finish(_: bytes) -> None:
            self.window.close_request(pending)

        pending = self.window.open_request(then=finish)  # clean: near miss, its continuation closes it

        def job() -> None:
            conn = self.pool.lend(self.home(row))  # clean: taken back after the call
            reply = b""
            if conn is not None:
                reply = conn.call(PUSH, encode_rows([row]) + body)
                self.pool.take_back(conn)
            self.window.resolve(pending.rid, reply)

        self.workers.submit(job)

    def close(self) -> None:
        self.gather()
        while self.sticky:
            _, conn = self.sticky.popitem()
            self.pool.take_back(conn)
        self.workers.shutdown()
        self.pool.prune()
