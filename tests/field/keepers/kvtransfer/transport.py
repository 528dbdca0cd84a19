"""Transfer handles over a thread; a handle must be closed to free its queue pair."""
from __future__ import annotations

import enum
from typing import Any, Dict, List, Optional

from .memory import Region


class State(enum.Enum):
    POSTED = 0
    DONE = 1
    FAILED = 2


class Handle:
    def __init__(self, qp: int, region: Region, peer: str) -> None:
        self.qp = qp
        self.region = region
        self.peer = peer
        self.state = State.POSTED


class Transport:
    def __init__(self, queue_pairs: int) -> None:
        self._qps: List[int] = list(range(queue_pairs))
        self.links: Dict[str, int] = {}

    def open(self, region: Region, peer: str) -> Optional[Handle]:
        if not self._qps:
            return None
        qp = self._qps.pop()  # leak: a peer without a link is answered with None after the queue pair was popped
        if peer not in self.links:
            return None
        return Handle(qp, region, peer)

    def connect(self, peer: str) -> None:
        self.links[peer] = self.links.get(peer, 0) + 1

    def disconnect(self, peer: str) -> None:
        self.links[peer] -= 1
        if self.links[peer] == 0:
            del self.links[peer]

    def poll(self, handle: Handle) -> State:
        if handle.state is State.POSTED:
            handle.state = State.DONE if handle.region.nbytes else State.FAILED
        return handle.state

    def close(self, handle: Handle) -> None:
        self._qps.append(handle.qp)
