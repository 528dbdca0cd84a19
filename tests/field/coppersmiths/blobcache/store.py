import mmap
from typing import Dict, Optional

from .extents import Extent, allocate_aligned, allocate_extent, allocate_trimmed, free_extent


class BlobStore:
    def __init__(self, mm: mmap.mmap):
        self.mm = mm
        self.where: Dict[str, Extent] = {}
        self.length: Dict[str, int] = {}

    def _write(self, e: Extent, data: bytes) -> None:
        self.mm[e.offset:e.offset + len(data)] = data

    def add(self, name: str, data: bytes) -> bool:
        if name in self.where:
            return False
        e = allocate_extent(len(data))  # clean: kept in where, remove() frees it
        if e is None:
            return False
        self._write(e, data)
        self.where[name] = e
        self.length[name] = len(data)
        return True

    def add_direct(self, name: str, data: bytes) -> bool:
        e = allocate_aligned(len(data), 8 << 20)  # leak: name already stored returns False with e allocated
        if e is None:
            return False
        if name in self.where:
            return False
        self._write(e, data)
        self.where[name] = e
        self.length[name] = len(data)
        return True

    def overwrite(self, name: str, data: bytes) -> bool:
        e = allocate_trimmed(len(data) * 2, len(data))  # clean: near miss, replaces the old extent, which is freed
        if e is None:
            return False
        old = self.where.get(name)
        self._write(e, data)
        self.where[name] = e
        self.length[name] = len(data)
        if old is not None:
            free_extent(old)
        return True

    def remove(self, name: str) -> None:
        e = self.where.pop(name, None)  # clean: freed
        if e is not None:
            self.length.pop(name)
            free_extent(e)

    def take_out(self, name: str) -> Optional[bytes]:
        e = self.where.pop(name, None)  # leak: the data is copied out, the extent is not freed
        if e is None:
            return None
        n = self.length.pop(name)
        return bytes(self.mm[e.offset:e.offset + n])

    def compact(self, name: str) -> bool:
        old = self.where[name]
        n = self.length[name]
        new = allocate_extent(n)  # clean: near miss, freed again if it does not lie lower
        if new is None:
            return False
        if new.first > old.first:
            free_extent(new)
            return False
        self._write(new, bytes(self.mm[old.offset:old.offset + n]))
        self.where[name] = new
        free_extent(old)
        return True
