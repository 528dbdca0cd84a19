"""Connections between prefill and decode workers, with a credit window each."""
from __future__ import annotations

from typing import Dict, List, Optional


class TransferError(Exception):
    pass


class Conn:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.broken = False
        self.sent: List[bytes] = []

    def send(self, data: bytes) -> None:
        if self.broken:
            raise TransferError(self.peer)
        self.sent.append(data)


class ConnPool:
    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self._idle: Dict[str, List[Conn]] = {}
        self._open: Dict[str, int] = {}

    def get_conn(self, peer: str) -> Conn:
        idle = self._idle.setdefault(peer, [])
        if idle:
            return idle.pop()
        if self._open.get(peer, 0) >= self.per_peer:
            raise TransferError(f"{peer}: all connections in use")
        self._open[peer] = self._open.get(peer, 0) + 1
        return Conn(peer)

    def put_conn(self, conn: Conn) -> None:
        if conn.broken:
            self._open[conn.peer] -= 1
            return
        self._idle[conn.peer].append(conn)


class CreditWindow:
    """Bounds bytes in flight toward one decode worker."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def take_credit(self, n: int) -> bool:
        if self.used + n > self.total:
            return False
        self.used += n
        return True

    def return_credit(self, n: int) -> None:
        self.used -= n


def send_once(pool: ConnPool, peer: str, data: bytes) -> bool:
    conn = pool.get_conn(peer)  # leak: a failed send is caught and the connection not put back
    try:
        conn.send(data)
    except TransferError:
        return False
    pool.put_conn(conn)
    return True


def send_with_retry(pool: ConnPool, peer: str, data: bytes, attempts: int) -> bool:
    conn: Optional[Conn] = None
    for _ in range(attempts):
        conn = pool.get_conn(peer)  # clean: near miss, put back on both ways before the next attempt
        try:
            conn.send(data)
        except TransferError:
            conn.broken = True
            pool.put_conn(conn)
            continue
        pool.put_conn(conn)
        return True
    return False


def handshake(pool: ConnPool, peers: List[str]) -> List[str]:
    ok: List[str] = []
    for peer in peers:
        conn = pool.get_conn(peer)  # clean: near miss, finally runs on the continue too
        try:
            if conn.broken:
                continue
            conn.send(b"HELLO")
            ok.append(peer)
        finally:
            pool.put_conn(conn)
    return ok
