"""Lock manager for the shards of an embedding table and the operations that use it."""
from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator, Optional

log = logging.getLogger(__name__)


@dataclass
class ShardLock:
    shard: int
    readers: int = 0
    writer: Optional[str] = None


class LockManager:
    """Shared and exclusive shard locks, taken by owner name and never re-entrant."""

    def __init__(self, shards: int) -> None:
        self._locks = [ShardLock(i) for i in range(shards)]
        self._cv = threading.Condition()

    def lock_shared(self, shard: int, timeout: float = 1.0) -> bool:
        lk = self._locks[shard]
        with self._cv:
            if not self._cv.wait_for(lambda: lk.writer is None, timeout):
                return False
            lk.readers += 1
            return True

    def unlock_shared(self, shard: int) -> None:
        with self._cv:
            self._locks[shard].readers -= 1
            self._cv.notify_all()

    def lock_exclusive(self, shard: int, owner: str, timeout: float = 1.0) -> bool:
        lk = self._locks[shard]
        with self._cv:
            if not self._cv.wait_for(lambda: lk.writer is None and lk.readers == 0, timeout):
                return False
            lk.writer = owner
            return True

    def unlock_exclusive(self, shard: int) -> None:
        with self._cv:
            self._locks[shard].writer = None
            self._cv.notify_all()

    @contextmanager
    def shared(self, shard: int) -> Iterator[bool]:
        ok = self.lock_shared(shard)  # clean: unlocked in the finally when it was locked
        try:
            yield ok
        finally:
            if ok:
                self.unlock_shared(shard)

    def lock_range(self, low: int, high: int, owner: str) -> bool:
        """All shards in [low, high) or none."""
        for shard in range(low, high):
            if not self.lock_exclusive(shard, owner):  # clean: near miss, rolled back or the caller's
                for taken in range(low, shard):
                    self.unlock_exclusive(taken)
                return False
        return True

    def unlock_range(self, low: int, high: int) -> None:
        for shard in range(low, high):
            self.unlock_exclusive(shard)


@dataclass
class Shard:
    rows: dict[int, list[float]] = field(default_factory=dict)
    version: int = 0


class EmbeddingTable:
    def __init__(self, shards: int) -> None:
        self.locks = LockManager(shards)
        self.shards = [Shard() for _ in range(shards)]
        self.conflicts = 0
        self._stats_mu = threading.Lock()
        self._migrating: Optional[tuple[int, int]] = None
        self._frozen: list[int] = []

    def _of(self, key: int) -> int:
        return key % len(self.shards)

    def read(self, key: int) -> Optional[list[float]]:
        with self.locks.shared(self._of(key)) as ok:  # clean: scoped lock
            return self.shards[self._of(key)].rows.get(key) if ok else None

    def read_many(self, keys: list[int]) -> dict[int, list[float]]:
        out: dict[int, list[float]] = {}
        for key in keys:
            shard = self._of(key)
            if not self.locks.lock_shared(shard):  # leak: continue for an absent key leaves its shard locked
                self.conflicts += 1
                continue
            row = self.shards[shard].rows.get(key)
            if row is None:
                continue
            out[key] = list(row)
            self.locks.unlock_shared(shard)
        return out

    def write(self, key: int, row: list[float], owner: str) -> bool:
        shard = self._of(key)
        if not self.locks.lock_exclusive(shard, owner):  # clean: unlocked in the finally
            return False
        try:
            if self.shards[shard].rows.get(key) == row:
                return True
            self.shards[shard].rows[key] = list(row)
            self.shards[shard].version += 1
            return True
        finally:
            self.locks.unlock_exclusive(shard)

    def write_if_version(self, key: int, row: list[float], owner: str, version: int) -> bool:
        shard = self._of(key)
        if not self.locks.lock_exclusive(shard, owner):  # leak: version mismatch returns while locked
            return False
        if self.shards[shard].version != version:
            self.conflicts += 1
            return False
        self.shards[shard].rows[key] = list(row)
        self.shards[shard].version = version + 1
        self.locks.unlock_exclusive(shard)
        return True

    def swap_rows(self, a: int, b: int, owner: str) -> bool:
        first, second = sorted((self._of(a), self._of(b)))
        if first == second:
            return False
        if not self.locks.lock_exclusive(first, owner):  # clean: unlocked on each way that has it
            return False
        if not self.locks.lock_exclusive(second, owner):  # clean: unlocked at the end
            self.locks.unlock_exclusive(first)
            return False
        sa, sb = self.shards[self._of(a)], self.shards[self._of(b)]
        sa.rows[a], sb.rows[b] = sb.rows.get(b, []), sa.rows.get(a, [])
        self.locks.unlock_exclusive(second)
        self.locks.unlock_exclusive(first)
        return True

    def copy_row(self, a: int, b: int, owner: str) -> bool:
        src, dst = self._of(a), self._of(b)
        if src == dst:
            return False
        if not self.locks.lock_shared(src):  # leak: not unlocked when the target shard is busy
            return False
        if not self.locks.lock_exclusive(dst, owner):  # clean: unlocked at the end
            self.conflicts += 1
            return False
        self.shards[dst].rows[b] = list(self.shards[src].rows.get(a, []))
        self.locks.unlock_exclusive(dst)
        self.locks.unlock_shared(src)
        return True

    # -- migration

    def begin_migration(self, low: int, high: int) -> bool:
        if self._migrating is not None:
            return False
        if not self.locks.lock_range(low, high, "migration"):  # clean: near miss, finish_migration() ends it
            return False
        self._migrating = (low, high)
        return True

    def finish_migration(self) -> None:
        if self._migrating is None:
            return
        low, high = self._migrating
        for shard in self.shards[low:high]:
            shard.version += 1
        self.locks.unlock_range(low, high)
        self._migrating = None

    # -- export

    def freeze(self) -> int:
        for shard in range(len(self.shards)):
            if shard in self._frozen:
                continue
            if self.locks.lock_shared(shard):  # leak: thaw() skips the first one, then empties the list
                self._frozen.append(shard)
        return len(self._frozen)

    def thaw(self) -> None:
        for shard in self._frozen[1:]:
            self.locks.unlock_shared(shard)
        log.info("thawed %d shards", len(self._frozen))
        self._frozen = []

    # -- statistics under a plain mutex

    def bump_conflicts(self, n: int) -> int:
        self._stats_mu.acquire()  # clean: released before the return
        self.conflicts += n
        value = self.conflicts
        self._stats_mu.release()
        return value

    def take_conflicts(self) -> int:
        if not self._stats_mu.acquire(timeout=0.1):  # leak: zero conflicts return before the release
            return -1
        if self.conflicts == 0:
            return 0
        value, self.conflicts = self.conflicts, 0
        self._stats_mu.release()
        return value

    def versions(self) -> list[int]:
        with ExitStack() as stack:
            for shard in range(len(self.shards)):
                stack.enter_context(self.locks.shared(shard))  # clean: near miss, the exit stack leaves it
            return [s.version for s in self.shards]

    def checksum(self, wanted: list[int]) -> float:
        total = 0.0
        with ExitStack() as stack:
            for shard in wanted:
                if not self.locks.lock_shared(shard):  # clean: near miss, the callback on the stack ends it
                    continue
                stack.callback(self.locks.unlock_shared, shard)
                total += sum(sum(r) for r in self.shards[shard].rows.values())
        return total


def retry_write(table: EmbeddingTable, key: int, change: Callable[[list], list], owner: str) -> bool:
    shard = key % len(table.shards)
    for attempt in range(4):
        if not table.locks.lock_exclusive(shard, owner, timeout=0.05):  # clean: unlocked on both ways
            time.sleep(0.01 * (attempt + 1))
            continue
        row = table.shards[shard].rows.get(key)
        if row is None:
            table.locks.unlock_exclusive(shard)
            return False
        table.shards[shard].rows[key] = change(row)
        table.locks.unlock_exclusive(shard)
        return True
    return False


def resize_range(table: EmbeddingTable, low: int, high: int, dim: int) -> int:
    if not table.locks.lock_range(low, high, "resize"):  # leak: unlocked only if some row was changed
        return 0
    changed = 0
    for shard in table.shards[low:high]:
        for key, row in shard.rows.items():
            if len(row) != dim:
                shard.rows[key] = (row + [0.0] * dim)[:dim]
                changed += 1
    if changed:
        table.locks.unlock_range(low, high)
    return changed
