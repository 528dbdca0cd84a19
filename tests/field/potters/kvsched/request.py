from __future__ import annotations

import enum
from typing import List, Optional

from .kvpool import Lease


class RequestState(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    DONE = 3


class Request:
    def __init__(self, rid: int, prompt: List[int], max_new: int) -> None:
        self.rid = rid
        self.prompt = prompt
        self.max_new = max_new
        self.state = RequestState.WAITING
        self.lease: Optional[Lease] = None
        self.cross: Optional[Lease] = None
        self.extra: List[Lease] = []

    def blocks_needed(self, block_size: int) -> int:
        return -(-len(self.prompt) // block_size)

    def adopt(self, lease: Lease) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = lease

    def drop(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        if self.cross is not None:
            self.cross.release()
            self.cross = None
        for lease in self.extra:
            lease.release()
        self.extra = []
