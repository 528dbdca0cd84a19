"""Client for the checkpoint/object store.

Two layers of pools: ConnPool (sockets) and ChunkPool (byte buffers).  A
PooledClient wraps a ConnPool and hides which endpoint a connection is for.
"""
from __future__ import annotations

import hashlib
import logging
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple

logger = logging.getLogger(__name__)


class StoreError(Exception):
    def __init__(self, code: int, key: str) -> None:
        super().__init__(f"{code} for {key}")
        self.code = code


Transport = Callable[[str, str, str, bytes], Tuple[int, bytes]]


class Conn:
    def __init__(self, host: str, seq: int, transport: Transport) -> None:
        self.host = host
        self.seq = seq
        self.transport = transport
        self.broken = False

    def get(self, key: str, off: int, size: int) -> Optional[bytes]:
        status, data = self.transport(self.host, "GET", f"{key}?range={off}-{off + size}", b"")
        return data if status == 200 else None

    def put(self, key: str, body: bytes) -> int:
        return self.transport(self.host, "PUT", key, body)[0]

    def head(self, key: str) -> Optional[int]:
        status, data = self.transport(self.host, "HEAD", key, b"")
        return int(data or b"0") if status == 200 else None


class ConnPool:
    def __init__(self, host: str, limit: int, transport: Transport) -> None:
        self.host = host
        self.limit = limit
        self.transport = transport
        self._idle: List[Conn] = []
        self._made = 0

    def dial(self) -> Optional[Conn]:
        while self._idle:
            conn = self._idle.pop()  # clean: near miss, a broken one is written off in _made, others are returned
            if conn.broken:
                self._made -= 1
                continue
            return conn
        if self._made >= self.limit:
            return None
        self._made += 1
        return Conn(self.host, self._made, self.transport)

    def hangup(self, conn: Conn) -> None:
        if conn.broken:
            self._made -= 1
            return
        self._idle.append(conn)


class ChunkPool:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._chunks = [bytearray(size) for _ in range(count)]

    def borrow(self) -> Optional[bytearray]:
        return self._chunks.pop() if self._chunks else None  # clean: returned to the caller

    def repay(self, chunk: bytearray) -> None:
        self._chunks.append(chunk)


class PooledClient:
    """Wrapper with fail-over: tries the primary pool and then the mirrors."""

    def __init__(self, primary: ConnPool, mirrors: List[ConnPool]) -> None:
        self.primary = primary
        self.mirrors = mirrors
        self._home: Dict[int, ConnPool] = {}

    def checkout(self) -> Optional[Conn]:
        for pool in [self.primary, *self.mirrors]:
            conn = pool.dial()  # clean: returned, _home remembers its pool
            if conn is not None:
                self._home[id(conn)] = pool
                return conn
        return None

    def checkout_for(self, key: str) -> Optional[Conn]:
        """A connection whose endpoint already has the key."""
        for pool in [self.primary, *self.mirrors]:
            conn = pool.dial()  # leak: an endpoint without the key is passed over without hangup
            if conn is None:
                continue
            if conn.head(key) is None:
                continue
            self._home[id(conn)] = pool
            return conn
        return None

    def checkin(self, conn: Conn) -> None:
        self._home.pop(id(conn)).hangup(conn)

    # -- single operations -------------------------------------------------

    def put(self, key: str, body: bytes) -> int:
        conn = self.checkout()  # clean: checked in before the status is looked at
        if conn is None:
            return 503
        status = conn.put(key, body)
        self.checkin(conn)
        if status >= 500:
            logger.warning("put %s: %d", key, status)
        return status

    def put_or_raise(self, key: str, body: bytes) -> None:
        conn = self.checkout()  # leak: the StoreError is raised before the checkin
        if conn is None:
            raise StoreError(503, key)
        status = conn.put(key, body)
        if status != 200:
            raise StoreError(status, key)
        self.checkin(conn)

    def get_range(self, key: str, off: int, size: int, retries: int = 3) -> Optional[bytes]:
        conn = self.checkout()  # clean: near miss, checked in before it is replaced and at both exits
        while conn is not None:
            data = conn.get(key, off, size)
            if data is not None or retries == 0:
                self.checkin(conn)
                return data
            retries -= 1
            conn.broken = True
            self.checkin(conn)
            conn = self.checkout()  # clean: the loop head takes it over
        return None

    def stat_many(self, keys: Iterable[str]) -> Dict[str, int]:
        out: Dict[str, int] = {}
        conn = self.checkout()  # leak: rebound to a new connection after a miss, the old one is lost
        for key in keys:
            if conn is None:
                break
            size = conn.head(key)
            if size is None:
                conn.broken = True
                conn = self.checkout()  # leak: lost the same way on a second miss
                continue
            out[key] = size
        if conn is not None:
            self.checkin(conn)
        return out

    def stream(self, key: str, step: int) -> Iterator[bytes]:
        conn = self.checkout_for(key)  # leak: the end-of-object return comes before the checkin
        if conn is None:
            return
        off = 0
        while True:
            data = conn.get(key, off, step)
            if data is None:
                break
            if not data:
                return
            off += len(data)
            yield data
        self.checkin(conn)

class MultipartUpload:
    def __init__(self, client: PooledClient, chunks: ChunkPool, key: str) -> None:
        self.client = client
        self.chunks = chunks
        self.key = key
        self.parts: List[bytearray] = []
        self.done = False

    def feed(self, data: bytes) -> bool:
        """Buffer `data`; parts are repaid in flush() or cancel()."""
        for off in range(0, len(data), self.chunks.size):
            chunk = self.chunks.borrow()  # clean: kept in self.parts which flush()/cancel() repay
            if chunk is None:
                return False
            piece = data[off:off + self.chunks.size]
            chunk[:len(piece)] = piece
            self.parts.append(chunk)
        return True

    def flush(self) -> bool:
        ok = True
        for n, chunk in enumerate(self.parts):
            if ok:
                ok = self.client.put(f"{self.key}.{n}", bytes(chunk)) == 200
            self.chunks.repay(chunk)
        self.parts.clear()
        self.done = ok
        return ok

    def cancel(self) -> None:
        while self.parts:
            self.chunks.repay(self.parts.pop())


def copy_object(src: PooledClient, dst: PooledClient, chunks: ChunkPool, key: str) -> bool:
    rd = src.checkout_for(key)  # clean: checked in on the wr failure and at the end
    if rd is None:
        return False
    wr = dst.checkout()  # leak: not checked in when no chunk can be borrowed
    if wr is None:
        src.checkin(rd)
        return False
    buf = chunks.borrow()  # clean: repaid at the end
    if buf is None:
        src.checkin(rd)
        return False
    data = rd.get(key, 0, chunks.size) or b""
    buf[:len(data)] = data
    status = wr.put(key, bytes(buf[:len(data)]))
    chunks.repay(buf)
    dst.checkin(wr)
    src.checkin(rd)
    return status == 200


def digest(client: PooledClient, chunks: ChunkPool, key: str, size: int) -> Optional[str]:
    buf = chunks.borrow()  # leak: a failed range read returns None with the chunk out
    if buf is None:
        return None
    h = hashlib.sha256()
    for off in range(0, size, chunks.size):
        data = client.get_range(key, off, chunks.size)
        if data is None:
            return None
        buf[:len(data)] = data
        h.update(buf[:len(data)])
    chunks.repay(buf)
    return h.hexdigest()
