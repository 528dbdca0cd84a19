"""Storage backend for KV chunks: reference counted memory objects, pins, and a remote tier."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import Iterator, Optional, Protocol

logger = logging.getLogger(__name__)

CacheKey = tuple[str, int]


class RemoteStore(Protocol):
    def exists(self, key: CacheKey) -> bool: ...
    def read_into(self, key: CacheKey, dst: memoryview) -> int: ...
    def write(self, key: CacheKey, src: memoryview) -> bool: ...


class MemoryObj:
    __slots__ = ("offset", "size", "ref_count", "pin_count", "allocator")

    def __init__(self, offset: int, size: int, allocator: "SlabAllocator") -> None:
        self.offset, self.size, self.allocator = offset, size, allocator
        self.ref_count, self.pin_count = 1, 0

    def view(self) -> memoryview:
        return memoryview(self.allocator.arena)[self.offset : self.offset + self.size]

    def ref_count_up(self) -> None:
        self.ref_count += 1

    def ref_count_down(self) -> None:
        self.ref_count -= 1
        if self.ref_count == 0:
            self.allocator.slabs.append(self.offset)

    def pin(self) -> None:
        self.pin_count += 1

    def unpin(self) -> None:
        self.pin_count -= 1


class SlabAllocator:
    def __init__(self, count: int, slab: int) -> None:
        self.arena = bytearray(count * slab)
        self.slab = slab
        self.slabs = [i * slab for i in range(count)]

    def allocate(self, size: int) -> Optional[MemoryObj]:
        if not self.slabs:
            return None
        offset = self.slabs.pop()  # leak: the slab is lost when the size check below refuses
        if size > self.slab:
            return None
        return MemoryObj(offset, size, self)

    def batched_allocate(self, size: int, n: int) -> Optional[list[MemoryObj]]:
        objs: list[MemoryObj] = []
        for _ in range(n):
            obj = self.allocate(size)  # clean: near miss, what was taken goes back when one is refused
            if obj is None:
                for o in objs:
                    o.ref_count_down()
                return None
            objs.append(obj)
        return objs


class LocalBackend:
    """The hot cache owns one reference on each object in it."""

    def __init__(self, allocator: SlabAllocator, remote: RemoteStore) -> None:
        self.allocator = allocator
        self.remote = remote
        self.lock = threading.Lock()
        self.hot: OrderedDict[CacheKey, MemoryObj] = OrderedDict()
        self.lookups: dict[str, list[MemoryObj]] = {}

    def contains(self, key: CacheKey) -> bool:
        with self.lock:
            return key in self.hot

    def submit_put(self, key: CacheKey, obj: MemoryObj) -> None:
        with self.lock:
            old = self.hot.pop(key, None)
            if old is not None:
                old.ref_count_down()
            obj.ref_count_up()  # clean: the cache's own reference, dropped on eviction, removal or replacement
            self.hot[key] = obj

    def get_blocking(self, key: CacheKey) -> Optional[MemoryObj]:
        with self.lock:
            obj = self.hot.get(key)
            if obj is None:
                return None
            self.hot.move_to_end(key)
            obj.ref_count_up()  # clean: the caller's reference
            return obj

    def evict(self, n: int) -> int:
        done = 0
        with self.lock:
            for key in list(self.hot):
                if done == n:
                    break
                if self.hot[key].pin_count == 0:
                    self.hot.pop(key).ref_count_down()
                    done += 1
        return done

    def remove(self, key: CacheKey) -> bool:
        with self.lock:
            obj = self.hot.pop(key, None)
        if obj is None:
            return False
        obj.ref_count_down()
        return True

    def store(self, key: CacheKey, data: bytes) -> bool:
        obj = self.allocator.allocate(len(data))  # clean: near miss, the creator's reference is dropped after the put
        if obj is None:
            return False
        obj.view()[:] = data
        self.submit_put(key, obj)
        obj.ref_count_down()
        return True

    def fetch_remote(self, key: CacheKey, size: int) -> Optional[MemoryObj]:
        obj = self.allocator.allocate(size)  # leak: dropped when the remote object is shorter than expected
        if obj is None:
            return None
        n = self.remote.read_into(key, obj.view())
        if n != size:
            logger.warning("short read of %s: %d of %d", key, n, size)
            return None
        return obj

    def prefetch(self, keys: list[CacheKey], size: int) -> int:
        loaded = 0
        for key in keys:
            if self.contains(key):
                continue
            obj = self.fetch_remote(key, size)  # leak: submit_put takes its own reference, this one is never dropped
            if obj is None:
                break
            self.submit_put(key, obj)
            loaded += 1
        return loaded

    def prefetch_batch(self, keys: list[CacheKey], size: int) -> int:
        objs = self.allocator.batched_allocate(size, len(keys))  # clean: near miss, each is dropped whether or not it was put
        if objs is None:
            return 0
        ok = 0
        for key, obj in zip(keys, objs):
            if self.remote.read_into(key, obj.view()) == size:
                self.submit_put(key, obj)
                ok += 1
            obj.ref_count_down()
        return ok

    def read(self, key: CacheKey, size: int) -> Optional[bytes]:
        obj = self.get_blocking(key)  # clean: dropped after the copy
        if obj is None:
            obj = self.fetch_remote(key, size)  # clean: near miss, the same drop serves it
            if obj is None:
                return None
        data = bytes(obj.view())
        obj.ref_count_down()
        return data

    def flush(self, keys: list[CacheKey]) -> int:
        written = 0
        for key in keys:
            obj = self.get_blocking(key)  # leak: an object which the remote has already is not dropped
            if obj is None:
                continue
            if self.remote.exists(key):
                continue
            if self.remote.write(key, obj.view()):
                written += 1
            obj.ref_count_down()
        return written

    def lookup_pin(self, lookup_id: str, keys: list[CacheKey]) -> int:
        pinned = self.lookups.setdefault(lookup_id, [])
        with self.lock:
            for key in keys:
                obj = self.hot.get(key)
                if obj is None:
                    break
                obj.pin()  # clean: near miss, listed under the lookup, unpinned by lookup_unpin
                pinned.append(obj)
        return len(pinned)

    def lookup_unpin(self, lookup_id: str) -> None:
        for obj in self.lookups.pop(lookup_id, []):
            obj.unpin()

    def iter_prefix(self, keys: list[CacheKey]) -> Iterator[memoryview]:
        for key in keys:
            obj = self.get_blocking(key)  # clean: near miss, dropped by finally when the consumer is done with it
            if obj is None:
                return
            try:
                yield obj.view()
            finally:
                obj.ref_count_down()
