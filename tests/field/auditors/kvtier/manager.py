from __future__ import annotations

from typing import Optional, Sequence

from .backends import LocalCPUBackend, RemoteBackend
from .memory import HostArena, MemoryObj


class StorageManager:
    def __init__(self, arena: HostArena, local: LocalCPUBackend, remote: RemoteBackend) -> None:
        self.arena = arena
        self.local = local
        self.remote = remote
        self.prefetched: dict[str, list[MemoryObj]] = {}

    def put(self, key: str, payload: bytes) -> bool:
        obj = self.arena.allocate(len(payload))  # clean: near miss, its own reference ends here while the local backend keeps another
        if obj is None:
            return False
        obj.payload = payload
        self.local.submit_put(key, obj)
        obj.ref_down()
        return True

    def put_batch(self, keys: Sequence[str], payloads: Sequence[bytes], size: int) -> int:
        objs = self.arena.batched_allocate(size, len(keys))  # leak: an oversized payload is passed over by continue before ref_down
        if objs is None:
            return 0
        stored = 0
        for key, payload, obj in zip(keys, payloads, objs):
            if len(payload) > size:
                continue
            obj.payload = payload
            self.local.submit_put(key, obj)
            obj.ref_down()
            stored += 1
        return stored

    def get(self, key: str) -> Optional[bytes]:
        obj = self.local.get_blocking(key)  # clean: let go of after the copy, None holds nothing
        if obj is None:
            obj = self.remote.fetch(key)  # clean: near miss, runs only when the local look-up gave nothing
        if obj is None:
            return None
        payload = bytes(obj.payload)
        obj.ref_down()
        return payload

    def contains(self, key: str, pin: bool) -> bool:
        obj = self.local.get_blocking(key)  # leak: with pin set the reference is kept but stored nowhere anybody could unpin it
        if obj is None:
            return key in self.remote.blobs
        if not pin:
            obj.ref_down()
        return True

    def prefetch(self, rid: str, keys: Sequence[str]) -> int:
        if rid in self.prefetched:
            return len(self.prefetched[rid])
        objs: list[MemoryObj] = []
        for key in keys:
            obj = self.local.get_blocking(key)  # clean: near miss, listed under the request and let go of by consume() or drop()
            if obj is None:
                break
            objs.append(obj)
        self.prefetched[rid] = objs
        return len(objs)

    def consume(self, rid: str) -> list[bytes]:
        out: list[bytes] = []
        for obj in self.prefetched.pop(rid, []):
            out.append(obj.payload)
            obj.ref_down()
        return out

    def drop(self, rid: str) -> None:
        for obj in self.prefetched.pop(rid, []):
            obj.ref_down()

    def longest_prefix(self, keys: Sequence[str]) -> int:
        hits = [self.local.get_blocking(key) for key in keys]  # leak: only the hits before the first miss are let go of, later ones stay
        length = 0
        for obj in hits:
            if obj is None:
                break
            obj.ref_down()
            length += 1
        return length

    def promote(self, key: str) -> bool:
        obj = self.remote.fetch(key)  # leak: submit_put adds a reference of its own, the one from fetch is never let go of
        if obj is None:
            return False
        self.local.submit_put(key, obj)
        return True
