"""KV chunks in pinned host memory with a disk tier behind it."""
import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Dict, List, Optional, Sequence


class MemoryObj:
    __slots__ = ("raw", "nbytes", "_refs", "_owner")

    def __init__(self, raw: bytearray, nbytes: int, owner: "PinnedAllocator"):
        self.raw = raw
        self.nbytes = nbytes
        self._refs = 1
        self._owner = owner

    def view(self) -> memoryview:
        return memoryview(self.raw)[: self.nbytes]

    def write(self, data: bytes) -> None:
        self.raw[: len(data)] = data

    def ref_count_up(self) -> None:
        self._refs += 1

    def ref_count_down(self) -> None:
        self._refs -= 1
        if self._refs == 0:
            self._owner._reclaim(self)


class PinnedAllocator:
    def __init__(self, slab_bytes: int, num_slabs: int):
        self.slab_bytes = slab_bytes
        self._slabs = [bytearray(slab_bytes) for _ in range(num_slabs)]

    def allocate(self, nbytes: int) -> Optional[MemoryObj]:
        if nbytes > self.slab_bytes or not self._slabs:
            return None
        return MemoryObj(self._slabs.pop(), nbytes, self)

    def batched_allocate(self, sizes: Sequence[int]) -> Optional[List[MemoryObj]]:
        objs: List[MemoryObj] = []
        for n in sizes:
            obj = self.allocate(n)  # clean: near miss, a failure half way gives back those before it
            if obj is None:
                for o in objs:
                    o.ref_count_down()
                return None
            objs.append(obj)
        return objs

    def _reclaim(self, obj: MemoryObj) -> None:
        self._slabs.append(obj.raw)


class LocalCPUBackend:
    def __init__(self) -> None:
        self.hot: "OrderedDict[str, MemoryObj]" = OrderedDict()

    def contains(self, key: str) -> bool:
        return key in self.hot

    def insert(self, key: str, obj: MemoryObj) -> None:
        if key in self.hot:
            return
        obj.ref_count_up()  # clean: the hot table's reference, dropped by evict
        self.hot[key] = obj

    def overwrite(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # clean: near miss, the entry it replaces is dropped first
        old = self.hot.pop(key, None)
        if old is not None:
            old.ref_count_down()
        self.hot[key] = obj

    def get(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        self.hot.move_to_end(key)
        obj.ref_count_up()  # clean: handed to the caller
        return obj

    def evict(self, n: int) -> None:
        for _ in range(min(n, len(self.hot))):
            _, obj = self.hot.popitem(last=False)
            obj.ref_count_down()


class DiskBackend:
    def __init__(self, root: str, allocator: PinnedAllocator):
        self.root = root
        self.allocator = allocator

    def _slurp(self, key: str) -> bytes:
        return Path(self.root, key).read_bytes()

    async def load(self, key: str, nbytes: int) -> Optional[MemoryObj]:
        obj = self.allocator.allocate(nbytes)  # leak: a file that is gone returns None with the slab held
        if obj is None:
            return None
        try:
            data = await asyncio.to_thread(self._slurp, key)
        except FileNotFoundError:
            return None
        obj.write(data)
        return obj

    async def save(self, key: str, obj: MemoryObj) -> None:
        await asyncio.to_thread(Path(self.root, key).write_bytes, obj.view())


class CacheEngine:
    def __init__(self, allocator: PinnedAllocator, cpu: LocalCPUBackend, disk: DiskBackend):
        self.allocator = allocator
        self.cpu = cpu
        self.disk = disk

    def store(self, chunks: Dict[str, bytes]) -> int:
        stored = 0
        for key, chunk in chunks.items():
            if self.cpu.contains(key):
                continue
            obj = self.allocator.allocate(len(chunk))  # clean: near miss, the backend counts its own and ours is dropped below
            if obj is None:
                break
            obj.write(chunk)
            self.cpu.insert(key, obj)
            obj.ref_count_down()
            stored += 1
        return stored

    def store_layerwise(self, keys: Sequence[str], layers: Sequence[bytes]) -> int:
        objs = self.allocator.batched_allocate([len(x) for x in layers])  # leak: slabs of layers already cached are skipped
        if objs is None:
            return 0
        stored = 0
        for key, obj, data in zip(keys, objs, layers):
            if self.cpu.contains(key):
                continue
            obj.write(data)
            self.cpu.insert(key, obj)
            obj.ref_count_down()
            stored += 1
        return stored

    def retrieve(self, keys: Sequence[str], chunk_bytes: int, dst: memoryview) -> int:
        hits = 0
        for i, key in enumerate(keys):
            obj = self.cpu.get(key)  # leak: a chunk of another size breaks out with its reference held
            if obj is None:
                break
            if obj.nbytes != chunk_bytes:
                break
            dst[i * chunk_bytes:(i + 1) * chunk_bytes] = obj.view()
            obj.ref_count_down()
            hits += 1
        return hits

    async def warm(self, key: str, nbytes: int) -> bool:
        obj = await self.disk.load(key, nbytes)  # clean: near miss, None holds nothing, else the table's own count remains
        if obj is None:
            return False
        self.cpu.overwrite(key, obj)
        obj.ref_count_down()
        return True

    def export(self, key: str) -> Optional[bytes]:
        obj = self.cpu.get(key)  # leak: only a copy leaves, the reference stays counted
        if obj is None:
            return None
        return bytes(obj.view())

    def checksum(self, key: str) -> int:
        obj = self.cpu.get(key)  # clean: near miss, dropped in the finally
        if obj is None:
            return 0
        try:
            return hash(bytes(obj.view()))
        finally:
            obj.ref_count_down()
