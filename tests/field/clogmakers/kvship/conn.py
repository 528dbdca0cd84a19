"""Connections to peers, a few idle ones are kept for every address."""
import collections
import logging
import socket
import struct
import threading
from contextlib import contextmanager

logger = logging.getLogger(__name__)

HELLO = b"kvship/2"


class PeerGone(ConnectionError):
    pass


class VersionMismatch(RuntimeError):
    pass


class Connection:
    def __init__(self, addr, sock):
        self.addr = addr
        self.sock = sock
        self.broken = False

    def send(self, kind, payload):
        try:
            self.sock.sendall(struct.pack("<HI", kind, len(payload)) + payload)
        except OSError as exc:
            self.broken = True
            raise PeerGone(f"{self.addr}: {exc}") from exc

    def recv(self):
        head = self._exactly(6)
        kind, n = struct.unpack("<HI", head)
        return kind, self._exactly(n)

    def _exactly(self, n):
        out = bytearray()
        while len(out) < n:
            piece = self.sock.recv(n - len(out))
            if not piece:
                self.broken = True
                raise PeerGone(str(self.addr))
            out += piece
        return bytes(out)

    def close(self):
        self.sock.close()


def dial(addr, timeout=5.0):
    sock = socket.create_connection(addr, timeout)  # leak: a peer with another greeting raises VersionMismatch, the socket stays open
    sock.sendall(HELLO)
    if sock.recv(len(HELLO)) != HELLO:
        raise VersionMismatch(f"{addr} does not speak {HELLO!r}")
    return Connection(addr, sock)


class ConnectionPool:
    def __init__(self, max_idle=4):
        self.max_idle = max_idle
        self._idle = collections.defaultdict(list)
        self._lock = threading.Lock()

    def get(self, addr):
        with self._lock:
            while self._idle[addr]:
                conn = self._idle[addr].pop()  # clean: returned, or closed when it is broken
                if not conn.broken:
                    return conn
                conn.close()
        return dial(addr)  # clean: returned to the caller

    def put(self, conn):
        with self._lock:
            if not conn.broken and len(self._idle[conn.addr]) < self.max_idle:
                self._idle[conn.addr].append(conn)
                return
        conn.close()

    @contextmanager
    def to(self, addr):
        conn = self.get(addr)  # clean: put in finally, which closes a broken one
        try:
            yield conn
        finally:
            self.put(conn)

    def close(self):
        with self._lock:
            idle, self._idle = self._idle, collections.defaultdict(list)
        for conns in idle.values():
            for c in conns:
                c.close()
