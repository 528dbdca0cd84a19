from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


class SegmentFull(Exception): ...


@dataclass(frozen=True)
class Extent:
    segment: str
    offset: int
    size: int


class SegmentAllocator:
    def __init__(self, name: str, capacity: int, chunk: int) -> None:
        self.name = name
        self.chunk = chunk
        self._free = [i * chunk for i in range(capacity // chunk)]

    def allocate(self) -> Extent:
        if not self._free:
            raise SegmentFull(self.name)
        return Extent(self.name, self._free.pop(), self.chunk)

    def deallocate(self, extent: Extent) -> None:
        self._free.append(extent.offset)


class LeaseTable:
    def __init__(self, max_per_key: int = 64) -> None:
        self._leases: dict[str, int] = {}
        self.max_per_key = max_per_key

    def grant(self, key: str) -> bool:
        if self._leases.get(key, 0) >= self.max_per_key:
            return False
        self._leases[key] = self._leases.get(key, 0) + 1
        return True

    def revoke(self, key: str) -> None:
        self._leases[key] -= 1
        if self._leases[key] == 0:
            del self._leases[key]

    def leased(self, key: str) -> bool:
        return self._leases.get(key, 0) > 0


@dataclass
class ObjectMeta:
    key: str
    replicas: list[Extent] = field(default_factory=list)
    complete: bool = False


class StoreMaster:
    def __init__(self, segments: list[SegmentAllocator]) -> None:
        self.segments = {s.name: s for s in segments}
        self.leases = LeaseTable()
        self.objects: dict[str, ObjectMeta] = {}
        self.staged: dict[str, ObjectMeta] = {}

    def _place(self) -> Optional[Extent]:
        for segment in self.segments.values():
            try:
                return segment.allocate()  # clean: near miss, the full segment raises before anything is taken and the extent is returned
            except SegmentFull:
                continue
        return None

    def _unplace(self, extent: Extent) -> None:
        self.segments[extent.segment].deallocate(extent)

    def put_start(self, key: str, replicas: int) -> Optional[ObjectMeta]:
        if key in self.objects or key in self.staged:
            return None
        meta = ObjectMeta(key)
        for _ in range(replicas):
            extent = self._place()  # leak: when a later replica finds no room, the extents placed so far go away with meta
            if extent is None:
                return None
            meta.replicas.append(extent)
        self.staged[key] = meta
        return meta

    def put_end(self, key: str) -> bool:
        meta = self.staged.pop(key, None)
        if meta is None:
            return False
        meta.complete = True
        self.objects[key] = meta
        return True

    def put_revoke(self, key: str) -> None:
        meta = self.staged.pop(key, None)
        if meta is not None:
            for extent in meta.replicas:
                self._unplace(extent)

    def add_replica(self, key: str) -> bool:
        extent = self._place()  # clean: near miss, unplaced for an unknown key and otherwise one more replica of the object
        if extent is None:
            return False
        meta = self.objects.get(key)
        if meta is None:
            self._unplace(extent)
            return False
        meta.replicas.append(extent)
        return True

    def migrate(self, key: str) -> bool:
        meta = self.objects.get(key)
        if meta is None or not meta.replicas:
            return False
        target = self._place()  # leak: put over the first replica, whose old extent is never unplaced
        if target is None:
            return False
        meta.replicas[0] = target
        return True

    def remove(self, key: str) -> bool:
        if self.leases.leased(key):
            return False
        meta = self.objects.pop(key, None)
        if meta is None:
            return False
        for extent in meta.replicas:
            self._unplace(extent)
        return True


class StoreClient:
    def __init__(self, master: StoreMaster) -> None:
        self.master = master
        self.memory: dict[tuple[str, int], bytes] = {}
        self.open_views: dict[str, list[memoryview]] = {}

    def put(self, key: str, payload: bytes) -> bool:
        meta = self.master.put_start(key, replicas=2)  # clean: near miss, revoked for an oversized payload and ended otherwise
        if meta is None:
            return False
        for extent in meta.replicas:
            if len(payload) > extent.size:
                self.master.put_revoke(key)
                return False
            self.memory[extent.segment, extent.offset] = payload
        return self.master.put_end(key)

    def put_if_newer(self, key: str, payload: bytes, version: int) -> bool:
        meta = self.master.put_start(key, replicas=1)  # leak: an outdated version leaves the object staged, neither ended nor revoked
        if meta is None:
            return False
        if not payload or payload[0] > version:
            return False
        extent = meta.replicas[0]
        self.memory[extent.segment, extent.offset] = payload
        return self.master.put_end(key)

    def get(self, key: str) -> Optional[bytes]:
        if not self.master.leases.grant(key):  # leak: a key that is not stored returns None with the lease granted
            return None
        meta = self.master.objects.get(key)
        if meta is None:
            return None
        data = self._read(meta)
        self.master.leases.revoke(key)
        return data

    def _read(self, meta: ObjectMeta) -> Optional[bytes]:
        for extent in meta.replicas:
            data = self.memory.get((extent.segment, extent.offset))
            if data is not None:
                return data
        return None

    def size_of(self, key: str) -> int:
        granted = self.master.leases.grant(key)  # clean: near miss, the flag that guards the revoke is the grant's own answer
        meta = self.master.objects.get(key)
        size = sum(e.size for e in meta.replicas) if meta is not None else 0
        if granted:
            self.master.leases.revoke(key)
        return size

    def open_view(self, key: str) -> Optional[memoryview]:
        if not self.master.leases.grant(key):  # clean: near miss, each view in open_views stands for one lease, close_views revokes them
            return None
        meta = self.master.objects.get(key)
        data = self._read(meta) if meta is not None else None
        if data is None:
            self.master.leases.revoke(key)
            return None
        view = memoryview(data)
        self.open_views.setdefault(key, []).append(view)
        return view

    def close_views(self, key: str) -> None:
        for view in self.open_views.pop(key, []):
            view.release()
            self.master.leases.revoke(key)
