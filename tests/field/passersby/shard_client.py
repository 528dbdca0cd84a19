"""Client for the embedding shards; one connection pool per shard."""
import logging
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)


class ShardUnavailable(Exception):
    pass


@dataclass
class Conn:
    sock: Optional[socket.socket]
    shard: int
    healthy: bool = True
    uses: int = 0

    def call(self, payload: bytes) -> bytes:
        self.uses += 1
        if self.sock is None:
            return payload
        self.sock.sendall(struct.pack("!I", len(payload)) + payload)
        (n,) = struct.unpack("!I", self.sock.recv(4))
        return self.sock.recv(n)


class ConnPool:
    def __init__(self, shard: int, size: int) -> None:
        self.shard = shard
        self._idle: List[Conn] = [Conn(None, shard) for _ in range(size)]
        self._cond = threading.Condition()

    def lease(self, timeout: float = 1.0) -> Conn:
        deadline = time.monotonic() + timeout
        with self._cond:  # clean: with statement
            while not self._idle:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ShardUnavailable(f"shard {self.shard}: no connection")
                self._cond.wait(left)
            return self._idle.pop()  # clean: handed to the caller

    def lease_healthy(self) -> Optional[Conn]:
        with self._cond:  # clean: with statement
            while self._idle:
                c = self._idle.pop()  # clean: near miss, broken ones are replaced by a fresh connection in the pool
                if c.healthy:
                    return c
                self._idle.insert(0, Conn(None, self.shard))
        return None

    def unlease(self, c: Conn) -> None:
        with self._cond:  # clean: with statement
            self._idle.append(c)
            self._cond.notify()

    @contextmanager
    def leased(self) -> Iterator[Conn]:
        c = self.lease()  # clean: finally gives it back
        try:
            yield c
        finally:
            self.unlease(c)


class ShardClient:
    def __init__(self, pools: Dict[int, ConnPool], retries: int = 3) -> None:
        self.pools = pools
        self.retries = retries
        self.sticky: Dict[str, Conn] = {}

    def lookup(self, shard: int, key: bytes) -> bytes:
        with self.pools[shard].leased() as c:  # clean: with statement
            return c.call(key)

    def lookup_retry(self, shard: int, key: bytes) -> Optional[bytes]:
        pool = self.pools[shard]
        for attempt in range(self.retries):
            c = pool.lease()  # leak: every failed attempt leaves its connection leased
            try:
                answer = c.call(key)
                pool.unlease(c)
                return answer
            except OSError as e:
                logger.info("shard %d attempt %d: %s", shard, attempt, e)
                time.sleep(0.01 * 2**attempt)
        return None

    def lookup_backoff(self, shard: int, key: bytes) -> Optional[bytes]:
        pool = self.pools[shard]
        for attempt in range(self.retries):
            c = pool.lease()  # clean: near miss, finally runs in every attempt
            try:
                return c.call(key)
            except OSError:
                c.healthy = False
                time.sleep(0.01 * 2**attempt)
            finally:
                pool.unlease(c)
        return None

    def fan_out(self, key: bytes) -> Dict[int, bytes]:
        with ExitStack() as stack:
            conns = {s: stack.enter_context(p.leased()) for s, p in self.pools.items()}  # clean: the stack leaves all of them
            return {s: c.call(key) for s, c in conns.items()}

    def fan_out_manual(self, key: bytes) -> Dict[int, bytes]:
        conns: List[Tuple[int, Conn]] = []
        for s, p in self.pools.items():
            try:
                conns.append((s, p.lease()))  # leak: a shard without connection raises again and the others stay leased
            except ShardUnavailable:
                logger.error("fan-out failed at shard %d", s)
                raise
        out = {s: c.call(key) for s, c in conns}
        for s, c in conns:
            self.pools[s].unlease(c)
        return out

    def bind(self, session: str, shard: int) -> None:
        if session in self.sticky:
            return
        self.sticky[session] = self.pools[shard].lease()  # clean: near miss, only for new sessions, unbind gives it back

    def unbind(self, session: str) -> None:
        c = self.sticky.pop(session, None)
        if c is not None:
            self.pools[c.shard].unlease(c)

    def ping(self, shard: int) -> bool:
        c = self.pools[shard].lease_healthy()  # leak: an unhealthy answer returns False without unlease
        if c is None:
            return False
        if c.call(b"ping") != b"ping":
            c.healthy = False
            return False
        self.pools[shard].unlease(c)
        return True

    def pick(self, key: bytes) -> bytes:
        shard = random.choice(list(self.pools))
        c = self.pools[shard].lease_healthy() or self.pools[shard].lease()  # clean: unleased below
        try:
            return c.call(key)
        finally:
            self.pools[shard].unlease(c)

    def shutdown(self) -> None:
        for session in list(self.sticky):
            self.unbind(session)
