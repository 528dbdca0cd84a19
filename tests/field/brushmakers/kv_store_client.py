"""Client of a remote KV store (L3 cache): pooled connections, stream permits and fetch buffers."""
from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

log = logging.getLogger("l3")


class StoreError(Exception):
    pass


class Conn:
    def __init__(self, addr) -> None:
        self.sock = socket.create_connection(addr)  # clean: kept in self.sock, close() closes it
        self.broken = False

    def ask(self, op: bytes, key: bytes, body: bytes = b"") -> bytes:
        self.sock.sendall(struct.pack("!cII", op, len(key), len(body)) + key + body)
        head = self.sock.recv(5)
        if len(head) < 5:
            self.broken = True
            return b""
        size = struct.unpack("!cI", head)[1]
        return self.sock.recv(size, socket.MSG_WAITALL)

    def close(self) -> None:
        self.sock.close()


class ConnPool:
    """LIFO of idle connections; a bounded number in all."""

    def __init__(self, addr, limit: int) -> None:
        self.addr = addr
        self.idle: "queue.LifoQueue[Conn]" = queue.LifoQueue()
        self.room = threading.BoundedSemaphore(limit)

    def lend(self, timeout: float = 1.0) -> Optional[Conn]:
        if not self.room.acquire(timeout=timeout):  # clean: near miss, released on OSError, else with the connection
            return None
        try:
            return self.idle.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            pass
        try:
            return Conn(self.addr)  # clean: returned to the caller
        except OSError:
            self.room.release()
            return None

    def lend_fresh(self) -> Optional[Conn]:
        """A connection that has not been idle (for long streams)."""
        self.room.acquire()  # leak: a refused connect returns None and the permit stays taken
        try:
            return Conn(self.addr)  # clean: returned to the caller
        except OSError as e:
            log.warning("connect to %s: %s", self.addr, e)
            return None

    def lend_checked(self) -> Optional[Conn]:
        conn = self.lend()  # leak: a connection that does not answer the ping is neither restored nor discarded
        if conn is None:
            return None
        if conn.ask(b"p", b"") != b"pong":
            return None
        return conn

    def restore(self, conn: Conn) -> None:
        if conn.broken:
            conn.close()
        else:
            self.idle.put(conn)
        self.room.release()

    @contextmanager
    def conn(self) -> Iterator[Optional[Conn]]:
        c = self.lend()  # clean: restored in the finally
        try:
            yield c
        finally:
            if c is not None:
                self.restore(c)


class PageBuffers:
    def __init__(self, n: int, size: int) -> None:
        self._lock = threading.Lock()
        self._bufs: List[bytearray] = [bytearray(size) for _ in range(n)]

    def rent(self) -> Optional[bytearray]:
        with self._lock:
            return self._bufs.pop() if self._bufs else None  # clean: returned to the caller

    def unrent(self, buf: bytearray) -> None:
        with self._lock:
            self._bufs.append(buf)


class StoreClient:
    def __init__(self, pool: ConnPool, bufs: PageBuffers) -> None:
        self.pool = pool
        self.bufs = bufs
        self.fetched: Dict[bytes, bytearray] = {}
        self.stream: Optional[Conn] = None

    def exists_many(self, keys: List[bytes]) -> List[bool]:
        found = []
        for k in keys:
            c = self.pool.lend()  # leak: an empty answer continues without restoring the connection
            if c is None:
                found.append(False)
                continue
            ans = c.ask(b"e", k)
            if not ans:
                found.append(False)
                continue
            found.append(ans == b"1")
            self.pool.restore(c)
        return found

    def put(self, key: bytes, page: bytes) -> bool:
        c = self.pool.lend()  # clean: restored in the finally, broken or not
        if c is None:
            return False
        try:
            return c.ask(b"w", key, page) == b"ok"
        except OSError:
            c.broken = True
            return False
        finally:
            self.pool.restore(c)

    def put_or_raise(self, key: bytes, page: bytes) -> None:
        c = self.pool.lend()  # leak: the StoreError for a refused page leaves before the restore
        if c is None:
            raise StoreError("no connection")
        ans = c.ask(b"w", key, page)
        if ans != b"ok":
            raise StoreError(f"put of {key!r}: {ans!r}")
        self.pool.restore(c)

    def put_retry(self, key: bytes, page: bytes, tries: int = 3) -> bool:
        for i in range(tries):
            c = self.pool.lend()  # clean: near miss, restored before each continue
            if c is None:
                time.sleep(0.05 * (i + 1))
                continue
            try:
                ans = c.ask(b"w", key, page)
            except OSError:
                c.broken = True
                self.pool.restore(c)
                continue
            self.pool.restore(c)
            if ans == b"ok":
                return True
        return False

    def fetch(self, key: bytes) -> bool:
        """Leaves the page in self.fetched; consume() takes it out."""
        if key in self.fetched:
            return True
        buf = self.bufs.rent()  # clean: unrented without a connection or a page, else in self.fetched
        if buf is None:
            return False
        try:
            with self.pool.conn() as c:  # clean: the context manager restores it
                data = c.ask(b"g", key) if c is not None else b""
        except OSError:
            data = b""
        if not data:
            self.bufs.unrent(buf)
            return False
        buf[: len(data)] = data
        self.fetched[key] = buf
        return True

    def consume(self, key: bytes, dst: memoryview) -> bool:
        buf = self.fetched.pop(key, None)
        if buf is None:
            return False
        dst[:] = memoryview(buf)[: len(dst)]
        self.bufs.unrent(buf)
        return True

    def fetch_direct(self, key: bytes, dst: memoryview) -> bool:
        buf = self.bufs.rent()  # leak: when no connection is to be had the buffer is not unrented
        if buf is None:
            return False
        c = self.pool.lend()  # clean: restored right after the question
        if c is None:
            return False
        try:
            data = c.ask(b"g", key)
        finally:
            self.pool.restore(c)
        buf[: len(data)] = data
        dst[:] = memoryview(buf)[: len(dst)]
        self.bufs.unrent(buf)
        return True

    def open_stream(self) -> bool:
        if self.stream is not None:
            return True
        self.stream = self.pool.lend_fresh()  # clean: near miss, kept in self.stream until close_stream()
        return self.stream is not None

    def ask_fresh(self, op: bytes, key: bytes) -> bytes:
        c = self.pool.lend()  # leak: the name is rebound to a fresh connection after a missed ping
        if c is None:
            return b""
        if c.ask(b"p", b"") != b"pong":
            c = self.pool.lend_fresh()  # clean: restored in the finally
            if c is None:
                return b""
        try:
            return c.ask(op, key)
        finally:
            self.pool.restore(c)

    def close_stream(self) -> None:
        if self.stream is not None:
            self.pool.restore(self.stream)
            self.stream = None

    def pages(self, keys: List[bytes]) -> Iterator[bytes]:
        c = self.pool.lend_checked()  # clean: near miss, the generator's finally restores it when closed early
        if c is None:
            return
        try:
            for k in keys:
                data = c.ask(b"g", k)
                if not data:
                    return
                yield data
        finally:
            self.pool.restore(c)

    def close(self) -> None:
        self.close_stream()
        for buf in self.fetched.values():
            self.bufs.unrent(buf)
        self.fetched.clear()
