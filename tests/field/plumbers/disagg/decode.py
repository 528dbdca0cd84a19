"""Consumer: receives KV into staging buffers and installs it into pages."""
from __future__ import annotations

import time
from typing import Callable, Dict, List, Optional

from .staging import StagingBuffer, StagingPool


class KVConsumer:
    def __init__(self, pool: StagingPool, install: Callable[[str, bytes], bool]) -> None:
        self.pool = pool
        self.install = install
        self.recv: Dict[str, StagingBuffer] = {}
        self.aux: Dict[str, StagingBuffer] = {}
        self.deadline: Dict[str, float] = {}

    def expect(self, rid: str, timeout: float) -> Optional[int]:
        """Index of a landing buffer for the producer to write to."""
        if rid in self.recv:
            return self.recv[rid].index
        buf = self.pool.reserve()  # leak: expire drops the entry of a request that timed out
        if buf is None:
            return None
        self.recv[rid] = buf
        self.deadline[rid] = time.monotonic() + timeout
        return buf.index

    def expect_aux(self, rid: str) -> Optional[int]:
        """Landing buffer for the first token and its hidden state."""
        buf = self.pool.reserve()  # clean: near miss, a displaced buffer goes back, done and expire return it
        if buf is None:
            return None
        previous = self.aux.get(rid)
        self.aux[rid] = buf
        if previous is not None:
            self.pool.unreserve(previous)
        return buf.index

    def done(self, rid: str, payload: bytes) -> bool:
        buf = self.recv.pop(rid, None)
        self.deadline.pop(rid, None)
        self._drop_aux(rid)
        if buf is None:
            return False
        buf.payload = payload
        ok = self.install(rid, buf.payload)
        self.pool.unreserve(buf)
        return ok

    def _drop_aux(self, rid: str) -> None:
        buf = self.aux.pop(rid, None)
        if buf is not None:
            self.pool.unreserve(buf)

    def expire(self) -> List[str]:
        now = time.monotonic()
        late = [rid for rid, t in self.deadline.items() if t < now]
        for rid in late:
            self.deadline.pop(rid)
            self.recv.pop(rid, None)
            self._drop_aux(rid)
        return late
