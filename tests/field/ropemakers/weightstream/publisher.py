from __future__ import annotations

from typing import Callable, Dict, List

from .chunks import ChunkPool, StagedChunk
from .loader import stage


class Publisher:
    """Pushes updated weights to the workers; a worker acknowledges by version."""

    def __init__(self, pool: ChunkPool, send: Callable[[int, int], bool]):
        self.pool = pool
        self.send = send
        self.unacked: Dict[int, List[StagedChunk]] = {}
        self.version = 0

    def publish(self, parts: List[bytes]) -> int:
        self.version += 1
        held: List[StagedChunk] = []
        self.unacked[self.version] = held
        for raw in parts:
            s = stage(self.pool, raw)  # clean: near miss, held is in unacked already, ack() gives it back
            if s is None:
                break
            held.append(s)
            self.send(self.version, s.used)
        return self.version

    def publish_one(self, raw: bytes) -> bool:
        s = stage(self.pool, raw)  # leak: a send that is refused returns before the chunk is recorded
        if s is None:
            return False
        if not self.send(self.version + 1, s.used):
            return False
        self.version += 1
        self.unacked[self.version] = [s]
        return True

    def ack(self, version: int) -> None:
        for v in [v for v in self.unacked if v <= version]:
            for s in self.unacked.pop(v):
                s.done()
