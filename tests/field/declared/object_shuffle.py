"""Shuffle stage that exchanges partitions through the shared object store."""
from __future__ import annotations

import logging
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from sharedstore import ObjectMissing, StoreClient

log = logging.getLogger(__name__)


@dataclass
class Partition:
    key: int
    obj: Any
    rows: int


def lookup(store: StoreClient, object_id: bytes) -> Optional[Any]:
    """Pin an object if it is there; None otherwise."""
    try:
        return store.pin_object(object_id)  # clean: returned to the caller
    except ObjectMissing:
        return None


def lookup_or_create(store: StoreClient, object_id: bytes, size: int) -> Tuple[Any, bool]:
    obj = lookup(store, object_id)  # clean: returned to the caller together with the flag
    if obj is not None:
        return obj, False
    return store.create_object(object_id, size), True  # clean: returned to the caller together with the flag


def ensure(store: StoreClient, object_id: bytes, payload: bytes) -> bool:
    obj, created = lookup_or_create(store, object_id, len(payload))  # leak: an object that existed stays pinned
    if created:
        obj.write(payload)
        obj.seal_and_drop()
    return created


def replace(store: StoreClient, object_id: bytes, payload: bytes) -> bool:
    obj, created = lookup_or_create(store, object_id, len(payload))  # clean: near miss, both values of the flag give the object back
    if not created:
        log.debug("%r exists", object_id)
        store.unpin_object(obj)
        return False
    obj.write(payload)
    obj.seal_and_drop()
    return True


def size_of(store: StoreClient, object_id: bytes) -> int:
    obj = lookup(store, object_id)  # leak: only the length of the pinned object is used
    return 0 if obj is None else len(obj.buffer)


class PartitionCache:
    """Recently used partitions, pinned while they are listed."""

    def __init__(self, store: StoreClient, capacity: int) -> None:
        self._store = store
        self._capacity = capacity
        self._entries: Dict[int, Partition] = {}

    def load(self, key: int, object_id: bytes) -> Optional[Partition]:
        entry = self._entries.get(key)
        if entry is not None:
            return entry
        obj = lookup(self._store, object_id)  # leak: evict pops the oldest entries and forgets to unpin them
        if obj is None:
            return None
        self._evict()
        entry = Partition(key, obj, obj.rows)
        self._entries[key] = entry
        return entry

    def _evict(self) -> None:
        while len(self._entries) >= self._capacity:
            oldest = next(iter(self._entries))
            self._entries.pop(oldest)

    def close(self) -> None:
        for entry in self._entries.values():
            self._store.unpin_object(entry.obj)
        self._entries.clear()


class Fetcher:
    """Pins partitions in the background; the consumer unpins what it takes."""

    def __init__(self, store: StoreClient, workers: int) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(workers)
        self._ready: "queue.Queue[Any]" = queue.Queue()
        self._futures: List[Future] = []

    def _fetch(self, object_id: bytes) -> None:
        obj = lookup(self._store, object_id)  # clean: near miss, put into the ready queue, which consume and close empty
        if obj is not None:
            self._ready.put(obj)

    def request(self, object_ids: List[bytes]) -> None:
        for object_id in object_ids:
            self._futures.append(self._pool.submit(self._fetch, object_id))

    def consume(self, wanted: int) -> Iterator[bytes]:
        for _ in range(wanted):
            obj = self._ready.get()
            try:
                yield bytes(obj.buffer)
            finally:
                self._store.unpin_object(obj)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        while not self._ready.empty():
            self._store.unpin_object(self._ready.get_nowait())


def merge(store: StoreClient, ids: List[bytes], target: bytes) -> int:
    parts: List[Any] = []
    for object_id in ids:
        part = lookup(store, object_id)  # clean: near miss, the parts found so far are unpinned in both arms
        if part is None:
            for earlier in parts:
                store.unpin_object(earlier)
            return 0
        parts.append(part)
    total = sum(len(part.buffer) for part in parts)
    merged = store.create_object(target, total)  # clean: sealed and dropped
    offset = 0
    for part in parts:
        offset += merged.write_at(offset, part.buffer)
        store.unpin_object(part)
    merged.seal_and_drop()
    return total


def broadcast(store: StoreClient, peer: StoreClient, ids: List[bytes]) -> int:
    sent = 0
    for object_id in ids:
        obj = store.pin_object(object_id)  # leak: objects the peer knows already are passed over while pinned
        if not peer.contains(object_id):
            peer.put_pinned(obj)
            sent += 1
    return sent


def checksum(store: StoreClient, object_id: bytes) -> int:
    with store.object_scope(object_id) as obj:  # clean: lease gives back by itself
        return obj.crc32()
