"""Connections to peers, pooled by address."""
from __future__ import annotations

import collections
import contextlib
from typing import Callable, Deque, Dict, Iterator, Protocol


class Link(Protocol):
    addr: str
    broken: bool

    def send(self, data: bytes) -> bool: ...
    def recv(self, n: int) -> bytes: ...
    def shut(self) -> None: ...


class LinkPool:
    def __init__(self, dial: Callable[[str], Link], per_peer: int):
        self.dial = dial
        self.per_peer = per_peer
        self._idle: Dict[str, Deque[Link]] = collections.defaultdict(collections.deque)
        self._count: Dict[str, int] = collections.Counter()

    def borrow(self, addr: str) -> Link:
        idle = self._idle[addr]
        if idle:
            return idle.popleft()
        if self._count[addr] >= self.per_peer:
            raise ConnectionError(f"all links to {addr} are in use")
        link = self.dial(addr)  # clean: returned to the caller
        self._count[addr] += 1
        return link

    def restore(self, link: Link) -> None:
        if link.broken:
            self._count[link.addr] -= 1
            link.shut()
            return
        self._idle[link.addr].append(link)

    @contextlib.contextmanager
    def borrowed(self, addr: str) -> Iterator[Link]:
        link = self.borrow(addr)  # clean: restored in finally
        try:
            yield link
        finally:
            self.restore(link)
