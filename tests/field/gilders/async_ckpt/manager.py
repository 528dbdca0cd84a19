from __future__ import annotations

import threading
from typing import Dict, List, Optional

from .staging import StagedCopy, StagingPool
from .writer import ShardWriter


class CheckpointManager:
    def __init__(self, pool: StagingPool, writer: ShardWriter, keep_staged: bool = False):
        self.pool = pool
        self.writer = writer
        self.keep_staged = keep_staged
        self._commit_lock = threading.Lock()
        self._staged: Dict[str, StagedCopy] = {}
        self._latest: Optional[StagedCopy] = None
        self.step = -1

    def save(self, step: int, shards: Dict[str, bytes]) -> bool:
        if not self._commit_lock.acquire(blocking=False):  # clean: near miss, released in the finally whenever it was taken
            return False
        try:
            if step <= self.step:
                return False
            for name, payload in shards.items():
                copy = StagedCopy(self.pool, f"{step}_{name}", payload)  # clean: queued, the writer's loop releases it
                self.writer.submit(copy)
            self.step = step
            return True
        finally:
            self._commit_lock.release()

    def stage(self, name: str, payload: bytes) -> None:
        old = self._staged.pop(name, None)
        if old is not None:
            old.release()
        self._staged[name] = StagedCopy(self.pool, name, payload)  # clean: near miss, the older entry is released first; flush hands the rest to the writer

    def flush(self) -> int:
        n = 0
        for name in list(self._staged):
            self.writer.submit(self._staged.pop(name))
            n += 1
        return n

    def remember(self, name: str, payload: bytes) -> None:
        self._latest = StagedCopy(self.pool, name, payload)  # leak: the next remember overwrites it without a release

    def latest_bytes(self) -> bytes:
        if self._latest is None:
            return b""
        return bytes(self._latest.view())

    def forget(self) -> None:
        if self._latest is not None:
            self._latest.release()
            self._latest = None

    def checksum(self, name: str, payload: bytes) -> int:
        with StagedCopy(self.pool, name, payload) as copy:  # clean: released by the with statement
            return sum(copy.view()) & 0xFFFFFFFF

    def estimate(self, payloads: List[bytes]) -> int:
        """Bytes that a save would write, after padding."""
        total = 0
        for i, payload in enumerate(payloads):
            copy = StagedCopy(self.pool, f"est{i}", payload)  # leak: released only when the copies are not kept, and nothing keeps it
            total += (len(copy.view()) + 511) // 512 * 512
            if not self.keep_staged:
                copy.release()
        return total

    def mirror(self, payload: bytes, replicas: int) -> bool:
        areas = self.pool.try_get_many(replicas)  # clean: near miss, an empty list holds nothing, otherwise all are put back
        if not areas:
            return False
        try:
            for area in areas:
                area.mem[: len(payload)] = payload
            return True
        finally:
            for area in areas:
                self.pool.put(area)

    def on_step_end(self, step: int, shards: Dict[str, bytes], every: int = 10) -> None:
        for name, payload in shards.items():
            self.remember(name, payload)
        if step % every == 0:
            self.save(step, shards)
