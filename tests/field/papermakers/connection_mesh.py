"""Connections between prefill and decode hosts.

Every host keeps a few idle links per peer, ordered by last use so that the
oldest are dropped first.  Links multiplex channels, and a global fd budget caps
how many are open at once.
"""
from __future__ import annotations

import heapq
import logging
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Iterator, Optional

log = logging.getLogger("mesh")


class PeerDown(ConnectionError):
    pass


@dataclass(order=True)
class Link:
    last_used: float
    peer: str = field(compare=False)
    sock: socket.socket = field(compare=False)
    channels: list[int] = field(compare=False, default_factory=lambda: list(range(16)))
    dead: bool = field(compare=False, default=False)

    def open_channel(self) -> Optional[int]:
        return self.channels.pop() if self.channels else None  # clean: returned to the caller

    def close_channel(self, ch: int) -> None:
        self.channels.append(ch)


class FdBudget:
    def __init__(self, n: int):
        self._sem = threading.Semaphore(n)

    def take(self, timeout: float = 0.2) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: given back through put

    def put(self) -> None:
        self._sem.release()


class Mesh:
    def __init__(self, budget: FdBudget, addrs: dict[str, tuple[str, int]], keep: int = 2):
        self.budget = budget
        self.addrs = addrs
        self.keep = keep
        self.idle: dict[str, list[Link]] = {p: [] for p in addrs}
        self.lock = threading.Lock()
        self.blocked: dict[str, float] = {}

    # ---- dialing ---------------------------------------------------------------

    def _dial(self, peer: str) -> Optional[Link]:
        if not self.budget.take():  # clean: put back when the connect fails, else owned by the link
            return None
        try:
            sock = socket.create_connection(self.addrs[peer], timeout=2.0)  # clean: owned by the returned link
        except OSError as exc:
            self.budget.put()
            self.blocked[peer] = time.monotonic() + 1.0
            log.warning("dial %s: %s", peer, exc)
            return None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(time.monotonic(), peer, sock)

    def _dial_authenticated(self, peer: str, token: bytes) -> Optional[Link]:
        if not self.budget.take():  # clean: put back on both failures
            return None
        try:
            sock = socket.create_connection(self.addrs[peer], timeout=2.0)  # leak: not closed when the peer refuses the token
        except OSError:
            self.budget.put()
            return None
        sock.sendall(len(token).to_bytes(4, "big") + token)
        if sock.recv(1) != b"\x01":
            self.budget.put()
            return None
        return Link(time.monotonic(), peer, sock)

    def _hang_up(self, link: Link) -> None:
        with suppress(OSError):
            link.sock.close()
        self.budget.put()

    # ---- lease -----------------------------------------------------------------

    def lease(self, peer: str) -> Optional[Link]:
        with self.lock:
            while self.idle[peer]:
                link = heapq.heappop(self.idle[peer])  # clean: near miss, dead links are hung up before the next pop
                if link.dead:
                    self._hang_up(link)
                    continue
                return link
        if self.blocked.get(peer, 0.0) > time.monotonic():
            return None
        return self._dial(peer)  # clean: returned to the caller

    def unlease(self, link: Link) -> None:
        link.last_used = time.monotonic()
        with self.lock:
            if not link.dead and len(self.idle[link.peer]) < self.keep:
                heapq.heappush(self.idle[link.peer], link)
                return
        self._hang_up(link)

    def newest(self, peer: str) -> Optional[Link]:
        """Most recently used idle link, good for latency probes."""
        with self.lock:
            if not self.idle[peer]:
                return None
            links = [heapq.heappop(self.idle[peer]) for _ in range(len(self.idle[peer]))]  # leak: all but the newest are not pushed back
            return links[-1]

    @contextmanager
    def channel(self, peer: str) -> Iterator[tuple[Link, int]]:
        lk = self.lease(peer)  # leak: the link is not unleased when all of its channels are taken
        if lk is None:
            raise PeerDown(peer)
        ch = lk.open_channel()  # clean: closed in finally
        if ch is None:
            raise PeerDown(f"{peer}: channels exhausted")
        try:
            yield lk, ch
        finally:
            lk.close_channel(ch)
            self.unlease(lk)

    # ---- users -----------------------------------------------------------------

    def ping(self, peer: str) -> Optional[float]:
        lk = self.lease(peer)  # leak: a short read returns None without unlease
        if lk is None:
            return None
        t0 = time.monotonic()
        lk.sock.sendall(b"P")
        if len(lk.sock.recv(1)) != 1:
            lk.dead = True
            return None
        self.unlease(lk)
        return time.monotonic() - t0

    def any_of(self, peers: list[str]) -> Optional[Link]:
        """A link to any live peer, preferring unblocked ones; caller unleases."""
        link: Optional[Link] = None
        for peer in random.sample(peers, len(peers)):
            link = self.lease(peer)  # clean: near miss, the loop ends at the first link that is not None
            if link is not None:
                break
        return link

    def fastest_of(self, peers: list[str]) -> Optional[Link]:
        best: Optional[Link] = None
        for peer in peers:
            link = self.lease(peer)  # leak: a slower candidate is neither kept nor unleased
            if link is None:
                continue
            if best is None:
                best = link
            elif link.last_used > best.last_used:
                self.unlease(best)
                best = link
        return best

    def call_with_retry(self, peers: list[str], payload: bytes) -> Optional[bytes]:
        link = self.any_of(peers)  # leak: the retry rebinds link to another peer without unleasing the first
        for _ in range(3):
            if link is None:
                return None
            try:
                link.sock.sendall(payload)
                answer = link.sock.recv(65536)
            except OSError:
                link.dead = True
                link = self.any_of(peers)  # leak: the last replacement is abandoned when the attempts run out
                continue
            self.unlease(link)
            return answer
        return None

    def close(self) -> None:
        with self.lock:
            for links in self.idle.values():
                while links:
                    self._hang_up(links.pop())  # clean: hung up at once


class StickySession:
    """Pins one link to a conversation until the decode host finishes it."""

    def __init__(self, mesh: Mesh, peer: str):
        self.mesh = mesh
        self.peer = peer
        self.link: Optional[Link] = None
        self.ch: Optional[int] = None

    def ensure(self) -> bool:
        if self.link is not None and not self.link.dead:
            return True
        if self.link is not None:
            self._drop()
        link = self.mesh.lease(self.peer)  # clean: near miss, the dead link is dropped before, the new one is stored
        if link is None:
            return False
        self.link = link
        self.ch = link.open_channel()  # clean: closed by _drop
        return True

    def _drop(self) -> None:
        if self.ch is not None:
            self.link.close_channel(self.ch)
            self.ch = None
        self.mesh.unlease(self.link)
        self.link = None

    def end(self) -> None:
        if self.link is not None:
            self._drop()
