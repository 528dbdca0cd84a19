"""Channels to peers and registered staging pages for KV transfer."""
from __future__ import annotations

import threading
from typing import Callable, Optional


class Channel:
    def __init__(self, peer: str, number: int) -> None:
        self.peer = peer
        self.number = number
        self.healthy = True
        self.sent = 0

    def write(self, page: memoryview) -> bool:
        self.sent += len(page)
        return self.healthy


class ChannelPool:
    """A few channels per peer, each used by one transfer at a time."""

    def __init__(self, per_peer: int) -> None:
        self.per_peer = per_peer
        self._idle: dict[str, list[Channel]] = {}
        self._count: dict[str, int] = {}
        self._lock = threading.Lock()

    def dial(self, peer: str) -> Optional[Channel]:
        with self._lock:
            idle = self._idle.setdefault(peer, [])
            if idle:
                return idle.pop()
            if self._count.get(peer, 0) >= self.per_peer:
                return None
            self._count[peer] = self._count.get(peer, 0) + 1
            return Channel(peer, self._count[peer])

    def hang_up(self, channel: Channel) -> None:
        with self._lock:
            if channel.healthy:
                self._idle[channel.peer].append(channel)
            else:
                self._count[channel.peer] -= 1

    def dial_any(self, peers: list[str]) -> Optional[Channel]:
        for peer in peers:
            channel = self.dial(peer)  # clean: unhealthy ones hung up, the good one handed on
            if channel is None:
                continue
            if channel.healthy:
                return channel
            self.hang_up(channel)
        return None

    def sweep(self, peers: list[str]) -> int:
        """Drop broken idle channels so that later dials make new ones."""
        dropped = 0
        for peer in peers:
            channel = self.dial(peer)  # leak: a healthy channel is not hung up again
            if channel is None:
                continue
            if not channel.healthy:
                self.hang_up(channel)
                dropped += 1
        return dropped


class PageRegistry:
    """Memory-registered staging pages; `grab` and `drop` by index."""

    def __init__(self, pages: int, size: int) -> None:
        self._mem = [bytearray(size) for _ in range(pages)]
        self._open = list(range(pages))
        self._waiters: list[Callable[[], None]] = []

    def grab(self, count: int) -> Optional[list[int]]:
        if count > len(self._open):
            return None
        taken = self._open[-count:] if count else []
        del self._open[len(self._open) - len(taken):]
        return taken

    def drop(self, pages: list[int]) -> None:
        self._open.extend(pages)
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def when_free(self, wake: Callable[[], None]) -> None:
        self._waiters.append(wake)

    def view(self, page: int) -> memoryview:
        return memoryview(self._mem[page])
