"""CPU and disk tiers of a KV cache server with pinned entries."""
from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Dict, Iterator, List, Optional


class MemoryObj:
    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.refs = 0
        self.payload = b""


class CPUAllocator:
    def __init__(self, chunks: int, size: int) -> None:
        self._free = [MemoryObj(i * size, size) for i in range(chunks)]
        self._lock = threading.Lock()

    def malloc(self) -> Optional[MemoryObj]:
        with self._lock:
            if not self._free:
                return None
            obj = self._free.pop()
            obj.refs = 1
            return obj

    def ref_up(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.refs += 1

    def ref_down(self, obj: MemoryObj) -> None:
        with self._lock:
            obj.refs -= 1
            if obj.refs == 0:
                obj.payload = b""
                self._free.append(obj)


class LocalCPUBackend:
    def __init__(self, allocator: CPUAllocator) -> None:
        self.allocator = allocator
        self.hot: "OrderedDict[str, MemoryObj]" = OrderedDict()

    def put(self, key: str, data: bytes) -> bool:
        if key in self.hot:
            return True
        obj = self.allocator.malloc()  # clean: near miss, too long a payload is brought down again, else it stays in hot
        if obj is None:
            return False
        if len(data) > obj.size:
            self.allocator.ref_down(obj)
            return False
        obj.payload = data
        self.hot[key] = obj
        return True

    def replace(self, key: str, data: bytes) -> bool:
        obj = self.allocator.malloc()  # leak: the object under the same key is overwritten and keeps its count
        if obj is None:
            return False
        obj.payload = data
        self.hot[key] = obj
        return True

    def get(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        self.allocator.ref_up(obj)  # clean: the caller brings the returned object down
        self.hot.move_to_end(key)
        return obj

    def evict(self, n: int) -> int:
        done = 0
        for key in list(self.hot):
            if done == n:
                break
            if self.hot[key].refs > 1:
                continue
            self.allocator.ref_down(self.hot.pop(key))
            done += 1
        return done


class DiskBackend:
    def __init__(self, root: Path, allocator: CPUAllocator) -> None:
        self.root = root
        self.allocator = allocator

    def load(self, key: str) -> Optional[MemoryObj]:
        path = self.root / key
        obj = self.allocator.malloc()  # leak: a missing file is handled with None and the object stays counted
        if obj is None:
            return None
        try:
            obj.payload = path.read_bytes()
        except FileNotFoundError:
            return None
        return obj

    def store(self, key: str, obj: MemoryObj) -> None:
        tmp = self.root / (key + ".tmp")
        fd = os.open(tmp, os.O_CREAT | os.O_WRONLY)  # clean: closed in the finally
        try:
            os.write(fd, obj.payload)
        finally:
            os.close(fd)
        os.replace(tmp, self.root / key)

    def header(self, key: str, magic: bytes) -> Optional[bytes]:
        fd = os.open(self.root / key, os.O_RDONLY)  # leak: a wrong magic returns None before os.close
        head = os.read(fd, 64)
        if not head.startswith(magic):
            return None
        os.close(fd)
        return head


class StorageManager:
    def __init__(self, cpu: LocalCPUBackend, disk: DiskBackend) -> None:
        self.cpu = cpu
        self.disk = disk
        self.pinned: Dict[str, List[MemoryObj]] = {}

    def fetch(self, key: str) -> Optional[MemoryObj]:
        obj = self.cpu.get(key)  # clean: returned to the caller, who brings it down
        if obj is not None:
            return obj
        return self.disk.load(key)  # clean: returned to the caller, who brings it down

    def read(self, key: str) -> bytes:
        obj = self.fetch(key)  # leak: the payload is returned and the object never brought down
        if obj is None:
            return b""
        return obj.payload

    def read_range(self, key: str, start: int, end: int) -> bytes:
        obj = self.fetch(key)  # clean: near miss, the bytes are copied out and the object brought down
        if obj is None:
            return b""
        out = obj.payload[start:end]
        self.cpu.allocator.ref_down(obj)
        return out

    def contains_all(self, keys: List[str]) -> bool:
        for key in keys:
            obj = self.cpu.get(key)  # clean: near miss, each hit is brought down before the next round
            if obj is None:
                return False
            self.cpu.allocator.ref_down(obj)
        return True

    def pin(self, rid: str, keys: List[str]) -> int:
        held = self.pinned.setdefault(rid, [])
        for key in keys:
            obj = self.fetch(key)  # clean: near miss, appended to the request's list, unpin brings all down
            if obj is None:
                break
            held.append(obj)
        return len(held)

    def unpin(self, rid: str) -> None:
        for obj in self.pinned.pop(rid, []):
            self.cpu.allocator.ref_down(obj)

    def stream(self, keys: List[str]) -> Iterator[bytes]:
        for key in keys:
            obj = self.fetch(key)  # leak: an empty payload continues with the object still up
            if obj is None:
                return
            if not obj.payload:
                continue
            try:
                yield obj.payload
            finally:
                self.cpu.allocator.ref_down(obj)

    def spill(self, keys: List[str]) -> int:
        done = 0
        for key in keys:
            obj = self.cpu.get(key)  # clean: near miss, a miss holds nothing, a hit is brought down by the finally
            if obj is None:
                continue
            try:
                self.disk.store(key, obj)
                done += 1
            except OSError:
                continue
            finally:
                self.cpu.allocator.ref_down(obj)
        return done
