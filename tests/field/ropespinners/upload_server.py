"""Chunk upload relay: accepts checkpoint shards on a socket, batches them and forwards them to a blob host."""
from __future__ import annotations

import errno
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import Callable, Deque, Dict, List, Optional, Tuple

log = logging.getLogger("relay")
HEADER = struct.Struct("!IQ")


class ChunkBuffers:
    """bytearrays of one size."""

    def __init__(self, count: int, size: int):
        self.size = size
        self._stack: List[bytearray] = [bytearray(size) for _ in range(count)]
        self._lock = threading.Lock()

    def lift(self) -> Optional[bytearray]:
        with self._lock:
            return self._stack.pop() if self._stack else None  # clean: returned to the caller

    def put_down(self, b: bytearray) -> None:
        with self._lock:
            self._stack.append(b)


class BlobLinks:
    """Keep-alive sockets to the blob host, at most `cap` open."""

    def __init__(self, addr: Tuple[str, int], cap: int, max_age: float = 60.0):
        self.addr = addr
        self.max_age = max_age
        self._permits = threading.BoundedSemaphore(cap)
        self._idle: Deque[Tuple[float, socket.socket]] = deque()

    def plug(self, timeout: float = 5.0) -> Optional[socket.socket]:
        if not self._permits.acquire(timeout=timeout):  # leak: kept when the connect fails and None is returned
            return None
        while self._idle:
            born, s = self._idle.pop()  # clean: near miss, an aged socket is closed, a young one returned
            if time.monotonic() - born < self.max_age:
                return s
            s.close()
        try:
            return socket.create_connection(self.addr, timeout)  # clean: returned to the caller
        except OSError as e:
            log.warning("blob host: %s", e)
            return None

    def unplug(self, s: socket.socket, broken: bool = False) -> None:
        if broken:
            s.close()
        else:
            self._idle.append((time.monotonic(), s))
        self._permits.release()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


def read_exact(conn: socket.socket, view: memoryview) -> bool:
    got = 0
    while got < len(view):
        n = conn.recv_into(view[got:])
        if n == 0:
            return False
        got += n
    return True


class Upload:
    """One client's upload in progress."""

    def __init__(self, conn: socket.socket, peer, bufs: ChunkBuffers):
        self.conn = conn
        self.peer = peer
        self.bufs = bufs
        self.parts: List[Tuple[bytearray, int]] = []

    def read_part(self) -> bool:
        head = bytearray(HEADER.size)
        if not read_exact(self.conn, memoryview(head)):
            return False
        kind, length = HEADER.unpack(head)
        buf = self.bufs.lift()  # leak: a client that hangs up in the middle of a part leaves buf out
        if buf is None:
            return False
        if length > self.bufs.size:
            self.bufs.put_down(buf)
            return False
        if not read_exact(self.conn, memoryview(buf)[:length]):
            return False
        self.parts.append((buf, length))
        return kind == 0

    def finish(self) -> None:
        for b, _ in self.parts:
            self.bufs.put_down(b)
        self.parts.clear()
        self.conn.close()


class Relay:
    def __init__(self, port: int, bufs: ChunkBuffers, links: BlobLinks):
        self.bufs = bufs
        self.links = links
        self.listener = socket.create_server(("", port), backlog=64)  # clean: closed by stop()
        self.listener.setblocking(False)
        self.uploads: Dict[int, Upload] = {}
        self.denied: Callable[[str], bool] = lambda host: False

    def accept_ready(self) -> None:
        while True:
            try:
                conn, peer = self.listener.accept()  # leak: a denied peer's socket is passed over without close
            except BlockingIOError:
                return
            if self.denied(peer[0]):
                log.info("denied %s", peer[0])
                continue
            conn.setblocking(True)
            self.uploads[conn.fileno()] = Upload(conn, peer, self.bufs)

    def turn(self, timeout: float) -> None:
        rd, _, _ = select.select([self.listener.fileno(), *self.uploads], [], [], timeout)
        for fd in rd:
            if fd == self.listener.fileno():
                self.accept_ready()
                continue
            up = self.uploads[fd]
            if not up.read_part():
                del self.uploads[fd]
                self.forward(up)
                up.finish()

    def forward(self, up: Upload) -> bool:
        if not up.parts:
            return True
        link = self.links.plug()  # clean: near miss, unplugged as broken in except, as sound in else
        if link is None:
            return False
        try:
            for b, n in up.parts:
                link.sendall(HEADER.pack(0, n))
                link.sendall(memoryview(b)[:n])
        except OSError as e:
            if e.errno != errno.EPIPE:
                log.exception("forwarding for %s", up.peer)
            self.links.unplug(link, broken=True)
            return False
        else:
            self.links.unplug(link)
            return True

    def stop(self) -> None:
        self.listener.close()
        for up in self.uploads.values():
            up.finish()
        self.uploads.clear()
        self.links.close()


def ping(links: BlobLinks) -> bool:
    link = links.plug(timeout=1.0)  # leak: a short answer returns False with the link plugged
    if link is None:
        return False
    link.sendall(HEADER.pack(9, 0))
    if len(link.recv(HEADER.size)) < HEADER.size:
        return False
    links.unplug(link)
    return True


def fetch_head(links: BlobLinks, bufs: ChunkBuffers, blob: int, n: int) -> Optional[bytes]:
    """First n bytes of a blob."""
    buf = bufs.lift()  # clean: put down in finally
    if buf is None:
        return None
    link = None
    sound = False
    try:
        link = links.plug()  # clean: near miss, finally unplugs it whenever it is not None
        if link is None:
            return None
        link.sendall(HEADER.pack(2, blob))
        if not read_exact(link, memoryview(buf)[:n]):
            return None
        sound = True
        return bytes(buf[:n])
    finally:
        bufs.put_down(buf)
        if link is not None:
            links.unplug(link, broken=not sound)


def send_with_retry(links: BlobLinks, payload: bytes, tries: int = 3) -> bool:
    for attempt in range(tries):
        link = links.plug()  # leak: a failed send sleeps and rebinds link without unplug
        if link is None:
            continue
        try:
            link.sendall(HEADER.pack(0, len(payload)) + payload)
            links.unplug(link)
            return True
        except OSError:
            time.sleep(0.1 * 2 ** attempt)
    return False


def coalesce(bufs: ChunkBuffers, parts: List[bytes]) -> Optional[Tuple[bytearray, int]]:
    out = bufs.lift()  # clean: put down when the parts do not fit, else returned with its length
    if out is None:
        return None
    at = 0
    for p in parts:
        if at + len(p) > bufs.size:
            bufs.put_down(out)
            return None
        out[at: at + len(p)] = p
        at += len(p)
    return out, at


def digest(bufs: ChunkBuffers, parts: List[bytes], hasher) -> Optional[str]:
    merged = coalesce(bufs, parts)  # leak: hashed and never put down
    if merged is None:
        return None
    buf, n = merged
    hasher.update(memoryview(buf)[:n])
    return hasher.hexdigest()
