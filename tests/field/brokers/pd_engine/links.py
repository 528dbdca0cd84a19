from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Link:
    peer: str
    index: int
    bytes_sent: int = 0
    failed: bool = False

    def write(self, nbytes: int) -> bool:
        if self.failed:
            return False
        self.bytes_sent += nbytes
        return True


class LinkPool:
    def __init__(self, peers: list[str], per_peer: int) -> None:
        self._idle = {p: [Link(p, i) for i in range(per_peer)] for p in peers}

    def lease(self, peer: str) -> Link | None:
        idle = self._idle.get(peer)
        return idle.pop() if idle else None

    def hand_back(self, link: Link) -> None:
        self._idle[link.peer].append(link)


class LinkUser:
    """Thin wrapper which counts leases per peer."""

    def __init__(self, pool: LinkPool) -> None:
        self.pool = pool
        self.leases: dict[str, int] = {}

    def connect(self, peer: str) -> Link | None:
        link = self.pool.lease(peer)  # clean: near miss, handed to the caller whatever the counter says
        if link is None:
            return None
        self.leases[peer] = self.leases.get(peer, 0) + 1
        return link

    def disconnect(self, link: Link) -> None:
        self.leases[link.peer] -= 1
        self.pool.hand_back(link)

    def ping(self, peer: str) -> bool:
        link = self.connect(peer)  # leak: a failed write answers False and never disconnects
        if link is None:
            return False
        if not link.write(8):
            return False
        self.disconnect(link)
        return True
