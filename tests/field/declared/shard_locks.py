"""Sharded feature store guarded by reader/writer locks."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

from shardlock import ShardLock

from features.codec import pack, unpack

log = logging.getLogger(__name__)


class FeatureStore:
    def __init__(self, shards: int) -> None:
        self._locks = [ShardLock(f"shard-{index}") for index in range(shards)]
        self._data: List[Dict[str, bytes]] = [{} for _ in range(shards)]
        self._meta = ShardLock("meta")
        self._frozen = False
        self._in_batch = False

    def _index(self, key: str) -> int:
        return hash(key) % len(self._locks)

    def get(self, key: str) -> Optional[Any]:
        index = self._index(key)
        lock = self._locks[index]
        lock.enter_shared()  # leak: a missing key returns with the lock held
        raw = self._data[index].get(key)
        if raw is None:
            return None
        value = unpack(raw)
        lock.leave_shared()
        return value

    def get_raw(self, key: str) -> Optional[bytes]:
        index = self._index(key)
        lock = self._locks[index]
        lock.enter_shared()  # clean: left in the finally
        try:
            return self._data[index].get(key)
        finally:
            lock.leave_shared()

    def put_if_absent(self, key: str, value: Any) -> bool:
        index = self._index(key)
        lock = self._locks[index]
        lock.enter_shared()  # clean: near miss, both arms leave it before going on
        if key in self._data[index]:
            lock.leave_shared()
            return False
        lock.leave_shared()
        packed = pack(value)
        lock.enter_exclusive()  # clean: left after the insert
        self._data[index].setdefault(key, packed)
        lock.leave_exclusive()
        return True

    def move(self, old: str, new: str) -> None:
        """Rename a key; the two locks are taken in index order."""
        low, high = sorted((self._index(old), self._index(new)))
        self._locks[low].enter_exclusive()  # clean: left in the finally
        if high != low:
            self._locks[high].enter_exclusive()  # clean: near miss, the same comparison decides in the finally
        try:
            raw = self._data[self._index(old)].pop(old, None)
            if raw is not None:
                self._data[self._index(new)][new] = raw
        finally:
            if high != low:
                self._locks[high].leave_exclusive()
            self._locks[low].leave_exclusive()

    def copy_shard(self, source: int, target: int) -> int:
        self._locks[source].enter_shared()  # leak: the second leave names the target once more, the source stays locked
        snapshot = dict(self._data[source])
        self._locks[target].enter_exclusive()  # clean: left after the update
        self._data[target].update(snapshot)
        self._locks[target].leave_exclusive()
        self._locks[target].leave_shared()
        return len(snapshot)

    def sizes(self) -> List[Tuple[str, int]]:
        result = []
        for lock, shard in zip(self._locks, self._data):
            lock.enter_shared()  # leak: empty shards are skipped with the lock held
            if not shard:
                continue
            result.append((lock.name, len(shard)))
            lock.leave_shared()
        return result

    def evict(self, prefix: str) -> int:
        evicted = 0
        for index, lock in enumerate(self._locks):
            if not lock.enter_exclusive(timeout=0.2):  # clean: near miss, the continue is the arm in which the lock was not obtained
                continue
            for key in [key for key in self._data[index] if key.startswith(prefix)]:
                del self._data[index][key]
                evicted += 1
            lock.leave_exclusive()
        return evicted

    def freeze(self) -> bool:
        if not self._meta.enter_exclusive(timeout=5.0):  # leak: freezing a store that is frozen already returns with the meta lock
            return False
        if self._frozen:
            return True
        self._frozen = True
        self._meta.leave_exclusive()
        return True

    def begin_batch(self) -> None:
        if self._in_batch:
            return
        self._meta.enter_exclusive()  # clean: commit_batch leaves it when the flag is set
        self._in_batch = True

    def commit_batch(self) -> None:
        if self._in_batch:
            self._in_batch = False
            self._meta.leave_exclusive()

    def _enter_all(self) -> None:
        for lock in self._locks:
            lock.enter_shared()  # clean: held for the caller, who calls _leave_all

    def _leave_all(self) -> None:
        for lock in reversed(self._locks):
            lock.leave_shared()

    def snapshot(self) -> Dict[str, bytes]:
        merged: Dict[str, bytes] = {}
        self._enter_all()  # clean: left by _leave_all in the finally
        try:
            for shard in self._data:
                merged.update(shard)
        finally:
            self._leave_all()
        return merged

    def largest(self) -> Optional[bytes]:
        self._enter_all()  # leak: returns before _leave_all when every shard is empty
        values = [raw for shard in self._data for raw in shard.values()]
        if not values:
            return None
        biggest = max(values, key=len)
        self._leave_all()
        return biggest

    @contextmanager
    def reading(self, key: str) -> Iterator[Dict[str, bytes]]:
        index = self._index(key)
        self._locks[index].enter_shared()  # clean: left in the finally after the yield
        try:
            yield self._data[index]
        finally:
            self._locks[index].leave_shared()

    def touch(self, key: str) -> bool:
        with self._meta.shared_section():  # clean: lease gives back by itself
            if self._frozen:
                return False
            with self.reading(key) as shard:  # clean: the context manager leaves the lock
                return key in shard
