"""Optimizer state on NVMe, in fixed-size blocks with reference counts.

Snapshots share blocks with the live state (copy on write), therefore a block
has a count; the last drop() makes it free.
"""
import concurrent.futures as cf
import logging
import os
import threading
from typing import Dict, List, Optional, Sequence

import numpy as np

logger = logging.getLogger("offload")

BLOCK = 4 << 20


class NoBlocks(Exception):
    pass


class BlockFile:
    """The file and its bitmap."""

    def __init__(self, path: str, nblocks: int):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # clean: kept as a number and closed in close()
        os.posix_fallocate(self.fd, 0, nblocks * BLOCK)
        self.nblocks = nblocks
        self._ref = np.zeros(nblocks, dtype=np.int32)
        self._free = list(range(nblocks - 1, -1, -1))
        self._lock = threading.Lock()

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def new(self) -> int:
        with self._lock:
            if not self._free:
                raise NoBlocks("all in use")
            b = self._free.pop()  # clean: its count is one and the caller has it
            self._ref[b] = 1
            return b

    def new_many(self, n: int) -> List[int]:
        out: List[int] = []
        with self._lock:
            for _ in range(n):
                if not self._free:
                    self._free.extend(reversed(out))
                    raise NoBlocks(f"{n} blocks, {len(out)} left")
                out.append(self._free.pop())  # clean: near miss, on a shortage the list is put back before the raise
            self._ref[out] = 1
        return out

    def new_aligned(self, n: int, align: int) -> Optional[List[int]]:
        """n blocks of which the first is a multiple of align, for direct IO."""
        got: List[int] = []
        with self._lock:
            self._free.sort(reverse=True)
            while self._free and len(got) < n:
                b = self._free.pop()  # leak: blocks in front of the first aligned one are passed over and not put back
                if not got and b % align:
                    continue
                got.append(b)
            if len(got) < n:
                self._free.extend(reversed(got))
                return None
            self._ref[got] = 1
            return got

    def add_ref(self, b: int) -> int:
        with self._lock:
            assert self._ref[b] > 0
            self._ref[b] += 1
            return b

    def drop(self, b: int) -> None:
        with self._lock:
            self._ref[b] -= 1
            if self._ref[b] == 0:
                self._free.append(b)

    def shared(self, b: int) -> bool:
        with self._lock:
            return self._ref[b] > 1

    def write(self, b: int, data: memoryview) -> None:
        if os.pwrite(self.fd, data, b * BLOCK) != len(data):
            raise OSError("short write")

    def read(self, b: int, n: int) -> bytes:
        data = os.pread(self.fd, n, b * BLOCK)
        if len(data) != n:
            raise OSError("short read")
        return data


class Extent:
    """A list of blocks which holds one array."""

    def __init__(self, file: BlockFile, blocks: Sequence[int], nbytes: int):
        self.file = file
        self.blocks = list(blocks)
        self.nbytes = nbytes

    @classmethod
    def store(cls, file: BlockFile, array: np.ndarray) -> "Extent":
        raw = memoryview(np.ascontiguousarray(array)).cast("B")
        count = -(-len(raw) // BLOCK)
        blocks = file.new_many(count)  # clean: near miss, dropped for an OSError and else owned by the extent
        try:
            for i, b in enumerate(blocks):
                file.write(b, raw[i * BLOCK:(i + 1) * BLOCK])
        except OSError:
            for b in blocks:
                file.drop(b)
            raise
        return cls(file, blocks, len(raw))

    def load(self, dtype) -> np.ndarray:
        out = bytearray()
        for b in self.blocks:
            out += self.file.read(b, min(BLOCK, self.nbytes - len(out)))
        return np.frombuffer(out, dtype=dtype)

    def fork(self) -> "Extent":
        for b in self.blocks:
            self.file.add_ref(b)  # clean: near miss, the new extent below has the second count of the same numbers
        return Extent(self.file, self.blocks, self.nbytes)

    def overwrite(self, i: int, data: memoryview) -> None:
        """Replace block i, copy on write."""
        old = self.blocks[i]
        if not self.file.shared(old):
            self.file.write(old, data)
            return
        b = self.file.new()  # leak: an OSError from write() is raised before the block is in the list, Shard.update() handles it
        self.file.write(b, data)
        self.blocks[i] = b
        self.file.drop(old)

    def free(self) -> None:
        while self.blocks:
            self.file.drop(self.blocks.pop())


class Shard:
    """Moments of one parameter shard by name ("exp_avg", "exp_avg_sq")."""

    def __init__(self, file: BlockFile, ident: str):
        self.file = file
        self.ident = ident
        self.parts: Dict[str, Extent] = {}

    def put(self, name: str, array: np.ndarray) -> None:
        ext = Extent.store(self.file, array)  # clean: near miss, the extent that was there is freed
        old = self.parts.pop(name, None)
        if old is not None:
            old.free()
        self.parts[name] = ext

    def put_if_changed(self, name: str, array: np.ndarray) -> bool:
        ext = Extent.store(self.file, array)  # leak: when the content is the same the new extent is dropped and not freed
        old = self.parts.get(name)
        if old is not None and old.nbytes == ext.nbytes:
            if np.array_equal(old.load(array.dtype), ext.load(array.dtype)):
                return False
        if old is not None:
            old.free()
        self.parts[name] = ext
        return True

    def update(self, name: str, i: int, data: bytes) -> bool:
        try:
            self.parts[name].overwrite(i, memoryview(data))
            return True
        except OSError as exc:
            logger.error("%s/%s[%d]: %s", self.ident, name, i, exc)
            return False

    def snapshot(self) -> "Snapshot":
        snap = Snapshot(self.ident)
        for name, ext in self.parts.items():
            snap.parts[name] = ext.fork()  # leak: discard() skips the parts that are not in the manifest
        return snap

    def destroy(self) -> None:
        for ext in self.parts.values():
            ext.free()
        self.parts.clear()


class Snapshot:
    def __init__(self, ident: str):
        self.ident = ident
        self.parts: Dict[str, Extent] = {}
        self.manifest: List[str] = []

    def mark(self, name: str) -> None:
        if name in self.parts and self.parts[name].nbytes:
            self.manifest.append(name)

    def export(self, root: str) -> None:
        for name, ext in self.parts.items():
            self.mark(name)
            with open(os.path.join(root, f"{self.ident}.{name}"), "wb") as f:  # clean: closed by with
                f.write(ext.load(np.uint8).tobytes())

    def discard(self) -> None:
        for name in self.manifest:
            self.parts[name].free()
        self.parts.clear()
        self.manifest.clear()


class Prefetcher:
    """Loads extents ahead of the optimizer step in threads."""

    def __init__(self, threads: int = 2):
        self.exec = cf.ThreadPoolExecutor(threads)
        self.jobs: Dict[str, tuple] = {}

    def want(self, key: str, ext: Extent) -> None:
        if key in self.jobs:
            return
        pinned = ext.fork()  # clean: near miss, fetch() or cancel() free it from the table
        self.jobs[key] = (pinned, self.exec.submit(pinned.load, np.float32))

    def fetch(self, key: str) -> Optional[np.ndarray]:
        pinned, fut = self.jobs.pop(key, (None, None))
        if pinned is None:
            return None
        try:
            return fut.result()
        except OSError as exc:
            logger.error("prefetch %s: %s", key, exc)
            return None
        finally:
            pinned.free()

    def peek(self, key: str, ext: Extent) -> Optional[np.ndarray]:
        """Load now, beside the queue."""
        pinned = ext.fork()  # leak: the OSError handler returns None and does not free the fork
        try:
            data = pinned.load(np.float32)
        except OSError as exc:
            logger.error("peek %s: %s", key, exc)
            return None
        pinned.free()
        return data

    def cancel(self) -> None:
        for pinned, fut in self.jobs.values():
            fut.cancel()
            cf.wait([fut], timeout=30.0)
            pinned.free()
        self.jobs.clear()
        self.exec.shutdown(wait=True)
