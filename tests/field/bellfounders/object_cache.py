"""Node-local object cache for model shards.

Objects live in fixed-size slabs, readers pin them, cold objects are spilled to a
directory through a small set of staging buffers.
"""
from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Optional

log = logging.getLogger(__name__)

MAGIC = b"OBJ1"


class SlabFull(RuntimeError):
    pass


class SlabAllocator:
    def __init__(self, slab_bytes: int, count: int) -> None:
        self.slab_bytes = slab_bytes
        self._mem = [bytearray(slab_bytes) for _ in range(count)]
        self._free = list(range(count))
        self._lock = threading.Lock()

    def reserve(self) -> Optional[int]:
        with self._lock:
            if not self._free:
                return None
            return self._free.pop()  # clean: handed to the caller

    def reserve_many(self, n: int) -> list[int]:
        out: list[int] = []
        for _ in range(n):
            slab = self.reserve()  # leak: slabs taken before the allocator ran dry are dropped by the raise
            if slab is None:
                raise SlabFull(f"wanted {n} slabs, got {len(out)}")
            out.append(slab)
        return out

    def surrender(self, slab: int) -> None:
        with self._lock:
            self._free.append(slab)

    def view(self, slab: int) -> memoryview:
        return memoryview(self._mem[slab])


class StagingPool:
    def __init__(self, nbytes: int, depth: int) -> None:
        self._q: "queue.Queue[bytearray]" = queue.Queue()
        for _ in range(depth):
            self._q.put(bytearray(nbytes))

    def borrow(self, timeout: float = 0.5) -> Optional[bytearray]:
        try:
            return self._q.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            return None

    def giveback(self, buf: bytearray) -> None:
        self._q.put(buf)


@dataclass
class Entry:
    key: str
    slabs: list[int] = field(default_factory=list)
    size: int = 0
    crc: int = 0
    pins: int = 0
    doomed: bool = False


class ObjectCache:
    def __init__(self, alloc: SlabAllocator, staging: StagingPool) -> None:
        self._alloc = alloc
        self._staging = staging
        self._entries: "OrderedDict[str, Entry]" = OrderedDict()
        self._lock = threading.RLock()

    # -- pins ------------------------------------------------------------
    def pin(self, key: str) -> Optional[Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.doomed:
                return None
            entry.pins += 1
            self._entries.move_to_end(key)
            return entry

    def unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.pins -= 1
            if entry.pins == 0 and entry.doomed:
                self._drop_slabs(entry)

    def _drop_slabs(self, entry: Entry) -> None:
        for slab in entry.slabs:
            self._alloc.surrender(slab)
        entry.slabs = []

    def _retire(self, entry: Entry) -> None:
        if entry.pins:
            entry.doomed = True
        else:
            self._drop_slabs(entry)

    # -- writes ----------------------------------------------------------
    def put(self, key: str, payload: bytes) -> bool:
        step = self._alloc.slab_bytes
        slabs = self._alloc.reserve_many(-(-len(payload) // step))  # leak: not surrendered when the key is present already
        with self._lock:
            if key in self._entries:
                return False
            for i, slab in enumerate(slabs):
                part = payload[i * step:(i + 1) * step]
                self._alloc.view(slab)[:len(part)] = part
            self._entries[key] = Entry(key, slabs, len(payload), zlib.crc32(payload))
        return True

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> Entry:
        entry = Entry(key)
        try:
            for chunk in chunks:
                slab = self._alloc.reserve()  # clean: near miss, the entry holds it and the except branch drops the entry
                if slab is None:
                    raise SlabFull(key)
                entry.slabs.append(slab)
                self._alloc.view(slab)[:len(chunk)] = chunk
                entry.size += len(chunk)
                entry.crc = zlib.crc32(chunk, entry.crc)
        except BaseException:
            self._drop_slabs(entry)
            raise
        with self._lock:
            stale = self._entries.pop(key, None)
            if stale is not None:
                self._retire(stale)
            self._entries[key] = entry
        return entry

    def rewrite(self, key: str, transform: Callable[[bytes], bytes]) -> bool:
        entry = self.pin(key)  # clean: unpinned in finally
        if entry is None:
            return False
        try:
            body = transform(self._gather(entry))
            step = self._alloc.slab_bytes
            fresh = self._alloc.reserve_many(-(-len(body) // step))  # leak: dropped when another reader pins the entry
            with self._lock:
                if entry.pins > 1:
                    log.info("rewrite of %s skipped, %d readers", key, entry.pins)
                    return False
                for i, slab in enumerate(fresh):
                    part = body[i * step:(i + 1) * step]
                    self._alloc.view(slab)[:len(part)] = part
                old, entry.slabs = entry.slabs, fresh
                entry.size, entry.crc = len(body), zlib.crc32(body)
            for slab in old:
                self._alloc.surrender(slab)
            return True
        finally:
            self.unpin(entry)

    def discard(self, key: str) -> bool:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return False
            self._retire(entry)
            return True

    # -- reads -----------------------------------------------------------
    def _gather(self, entry: Entry) -> bytes:
        out = bytearray()
        for slab in entry.slabs:
            out += self._alloc.view(slab)
        return bytes(out[:entry.size])

    def read_range(self, key: str, start: int, length: int) -> bytes:
        entry = self.pin(key)  # leak: a start past the end returns with the pin held
        if entry is None:
            raise KeyError(key)
        if start >= entry.size:
            return b""
        body = self._gather(entry)[start:start + length]
        self.unpin(entry)
        return body

    # -- disk tier -------------------------------------------------------
    def spill(self, key: str, root: Path) -> Optional[Path]:
        entry = self.pin(key)  # leak: stays pinned when no staging buffer is free
        if entry is None:
            return None
        buf = self._staging.borrow()  # clean: given back in finally
        if buf is None:
            log.warning("no staging buffer, %s stays hot", key)
            return None
        try:
            body = self._gather(entry)
            buf[:4] = MAGIC
            buf[4:4 + len(body)] = body
            path = root / key
            path.write_bytes(memoryview(buf)[:4 + len(body)])
            return path
        finally:
            self._staging.giveback(buf)
            self.unpin(entry)

    def warm(self, paths: Iterable[Path]) -> int:
        loaded = 0
        for path in paths:
            buf = self._staging.borrow()  # leak: `continue` on a foreign file skips giveback
            if buf is None:
                break
            raw = path.read_bytes()
            buf[:len(raw)] = raw
            if bytes(buf[:4]) != MAGIC:
                log.warning("%s is not an object file", path)
                continue
            if self.put(path.name, bytes(buf[4:len(raw)])):
                loaded += 1
            self._staging.giveback(buf)
        return loaded
