"""Channels to peers, lent for one transfer at a time."""
from __future__ import annotations

import threading
from collections import defaultdict
from typing import Callable, DefaultDict, List, Optional


class Channel:
    def __init__(self, peer: str, qp: int) -> None:
        self.peer = peer
        self.qp = qp
        self.healthy = True

    def post(self, data: bytes) -> int:
        return len(data) if self.healthy else 0


class ChannelTable:
    def __init__(self, dial: Callable[[str], Optional[Channel]], per_peer: int) -> None:
        self.dial = dial
        self.per_peer = per_peer
        self.idle: DefaultDict[str, List[Channel]] = defaultdict(list)
        self.count: DefaultDict[str, int] = defaultdict(int)
        self.mu = threading.Lock()

    def seize(self, peer: str) -> Optional[Channel]:
        with self.mu:
            if self.idle[peer]:
                return self.idle[peer].pop()  # clean: returned to the caller
            if self.count[peer] >= self.per_peer:
                return None
            self.count[peer] += 1
        ch = self.dial(peer)  # clean: returned to the caller, or the count was taken back
        if ch is None:
            with self.mu:
                self.count[peer] -= 1
        return ch

    def seize_healthy(self, peer: str) -> Optional[Channel]:
        ch = self.seize(peer)  # leak: an unhealthy channel is replaced by the next without being unseized
        while ch is not None and not ch.healthy:
            ch = self.seize(peer)  # leak: likewise for each further unhealthy one
        return ch

    def unseize(self, ch: Channel) -> None:
        with self.mu:
            if ch.healthy:
                self.idle[ch.peer].append(ch)
            else:
                self.count[ch.peer] -= 1
