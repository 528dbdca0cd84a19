"""Memory regions registered with the NIC, and the credits of one link."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(frozen=True)
class MemoryKey:
    rkey: int
    address: int
    length: int


class RegionRegistry:
    """Registered regions are scarce: the NIC holds `limit` of them."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._next = 1
        self._live: Dict[int, MemoryKey] = {}
        self._mutex = threading.Lock()

    def register(self, address: int, length: int) -> Optional[MemoryKey]:
        with self._mutex:
            if len(self._live) >= self._limit:
                return None
            key = MemoryKey(self._next, address, length)
            self._next += 1
            self._live[key.rkey] = key
            return key

    def deregister(self, key: MemoryKey) -> None:
        with self._mutex:
            self._live.pop(key.rkey, None)


class CreditWindow:
    def __init__(self, credits: int) -> None:
        self._left = credits
        self._cond = threading.Condition()

    def take(self, n: int = 1) -> int:
        with self._cond:
            while self._left < n:
                self._cond.wait()
            self._left -= n
            return n

    def try_take(self, n: int = 1) -> bool:
        with self._cond:
            if self._left < n:
                return False
            self._left -= n
            return True

    def refund(self, n: int = 1) -> None:
        with self._cond:
            self._left += n
            self._cond.notify_all()


class QueuePairs:
    def __init__(self, peers: List[str], per_peer: int) -> None:
        self._idle = {p: list(range(per_peer)) for p in peers}

    def connect(self, peer: str) -> Optional["Channel"]:
        spare = self._idle.get(peer)
        if not spare:
            return None
        return Channel(self, peer, spare.pop())

    def _put(self, peer: str, number: int) -> None:
        self._idle[peer].append(number)


class Channel:
    def __init__(self, owner: QueuePairs, peer: str, number: int) -> None:
        self._owner = owner
        self.peer = peer
        self.number = number
        self.posted = 0

    def post_write(self, key: MemoryKey, payload: bytes) -> int:
        self.posted += 1
        return min(key.length, len(payload))

    def poll(self) -> int:
        done, self.posted = self.posted, 0
        return done

    def disconnect(self) -> None:
        self._owner._put(self.peer, self.number)
