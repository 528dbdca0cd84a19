"""Client of the parameter servers: sockets in a pool, the pool in a balancer, the
balancer in a client.  Each layer only knows the one below.
"""
from __future__ import annotations

import itertools
import logging
import queue
import socket
import struct
from typing import Callable, Iterator

import numpy as np

log = logging.getLogger("ps")


class Conn:
    def __init__(self, addr: tuple[str, int]) -> None:
        self.addr = addr
        self.sock = socket.create_connection(addr, timeout=2.0)  # clean: kept in self.sock, closed by hangup()
        self.broken = False

    def call(self, op: bytes, payload: bytes) -> bytes:
        self.sock.sendall(op + struct.pack("<Q", len(payload)) + payload)
        (n,) = struct.unpack("<Q", self.sock.recv(8, socket.MSG_WAITALL))
        return self.sock.recv(n, socket.MSG_WAITALL)

    def hangup(self) -> None:
        self.broken = True
        self.sock.close()


class ConnPool:
    """`size` sockets to one server; broken ones are redialled when they come back."""

    def __init__(self, addr: tuple[str, int], size: int) -> None:
        self.addr = addr
        self._q: queue.LifoQueue[Conn | None] = queue.LifoQueue()
        for _ in range(size):
            self._q.put(None)

    def dial(self, timeout: float | None = None) -> Conn:
        tok = self._q.get(timeout=timeout)  # clean: a dead dial puts the token back before raising
        if tok is not None:
            return tok
        try:
            return Conn(self.addr)
        except OSError:
            self._q.put(None)
            raise

    def dial_nowait(self) -> Conn | None:
        try:
            tok = self._q.get_nowait()  # leak: the token is not put back when the dial fails
        except queue.Empty:
            return None
        if tok is None:
            try:
                tok = Conn(self.addr)
            except OSError:
                return None
        return tok

    def park(self, conn: Conn) -> None:
        self._q.put(None if conn.broken else conn)


class Balancer:
    """Round robin over replicas; remembers which pool a connection is of."""

    def __init__(self, pools: list[ConnPool]) -> None:
        self.pools = pools
        self._rr = itertools.cycle(range(len(pools)))
        self._home: dict[int, ConnPool] = {}
        self.drained: set[tuple[str, int]] = set()

    def pick(self) -> Conn:
        pool = self.pools[next(self._rr)]
        conn = pool.dial(timeout=1.0)  # clean: noted in _home and returned
        self._home[id(conn)] = pool
        return conn

    def pick_any(self) -> Conn | None:
        for _ in self.pools:
            pool = self.pools[next(self._rr)]
            conn = pool.dial_nowait()  # leak: a connection to a drained server is dropped
            if conn is None:
                continue
            if conn.addr in self.drained:
                continue
            self._home[id(conn)] = pool
            return conn
        return None

    def put(self, conn: Conn) -> None:
        self._home.pop(id(conn)).park(conn)


class Borrowed:
    def __init__(self, lb: Balancer, swallow: bool = False) -> None:
        self.lb = lb
        self.swallow = swallow

    def __enter__(self) -> Conn:
        self.conn = self.lb.pick()  # leak: __exit__ returns early for a swallowed OSError
        return self.conn

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, OSError):
            self.conn.hangup()
            if self.swallow:
                return True
        self.lb.put(self.conn)
        return False


class PSClient:
    def __init__(self, lb: Balancer, own_conn: bool = True, sticky: Conn | None = None) -> None:
        self.lb = lb
        self.own_conn = own_conn
        self.sticky = sticky

    def pull(self, ids: np.ndarray) -> np.ndarray:
        conn = self.lb.pick()  # clean: put in finally
        try:
            return np.frombuffer(conn.call(b"P", ids.tobytes()), np.float32)
        except OSError:
            conn.hangup()
            raise
        finally:
            self.lb.put(conn)

    def push(self, ids: np.ndarray, grads: np.ndarray, conn: Conn | None = None) -> bool:
        mine = conn is None
        if mine:
            conn = self.lb.pick()  # clean: near miss, put when mine says that it was picked here
        try:
            return conn.call(b"G", ids.tobytes() + grads.tobytes()) == b"ok"
        finally:
            if mine:
                self.lb.put(conn)

    def push_sparse(self, ids: np.ndarray, grads: np.ndarray) -> bool:
        conn = self.sticky
        if conn is None:
            conn = self.lb.pick()  # leak: not put when own_conn is false, though it was picked here
        ok = conn.call(b"S", ids.tobytes() + grads.tobytes()) == b"ok"
        if self.own_conn and conn is not self.sticky:
            self.lb.put(conn)
        return ok

    def pull_retry(self, ids: np.ndarray, attempts: int = 3) -> np.ndarray | None:
        conn = self.lb.pick()  # clean: near miss, put before each new pick and on both ways out
        for _ in range(attempts):
            try:
                raw = conn.call(b"P", ids.tobytes())
            except OSError:
                conn.hangup()
                self.lb.put(conn)
                conn = self.lb.pick()  # clean: put on the next round or after the loop
                continue
            self.lb.put(conn)
            return np.frombuffer(raw, np.float32)
        self.lb.put(conn)
        return None

    def ping_all(self, on_reply: Callable[[bytes], bool]) -> int:
        n = 0
        while (conn := self.lb.pick_any()) is not None:  # leak: a false answer of the callback returns before put
            if not on_reply(conn.call(b"?", b"")):
                return n
            self.lb.put(conn)
            n += 1
            if n >= len(self.lb.pools):
                break
        return n

    def scan(self, start: int) -> Iterator[np.ndarray]:
        with Borrowed(self.lb) as conn:  # clean: with block, without swallow
            pos = start
            while raw := conn.call(b"N", struct.pack("<Q", pos)):
                yield np.frombuffer(raw, np.float32)
                pos += 1
