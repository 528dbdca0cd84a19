"""Sharded checkpoint writer: host chunks, shard files and a manifest lock."""
from __future__ import annotations

import json
import logging
import os
import threading
from typing import Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class ChunkPool:
    """Bounded count of host chunks; spare ones wait in a stack."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._budget = count
        self._stack: List[bytearray] = []
        self._cv = threading.Condition()

    def obtain(self) -> bytearray:
        with self._cv:  # clean: with block
            while not self._stack and self._budget == 0:
                self._cv.wait()
            if self._stack:
                return self._stack.pop()  # clean: returned
            self._budget -= 1
            return bytearray(self.nbytes)

    def relinquish(self, chunk: bytearray) -> None:
        with self._cv:  # clean: with block
            self._stack.append(chunk)
            self._cv.notify()


class ShardWriter:
    def __init__(self, directory: str, chunks: ChunkPool) -> None:
        self.directory = directory
        self.chunks = chunks
        self._file = None
        self._written = 0
        self._index = 0

    def open_next(self) -> None:
        if self._file is not None:
            self._file.close()
        name = os.path.join(self.directory, f"shard-{self._index:05d}.bin")
        self._file = open(name, "wb")  # clean: near miss, the previous file was closed, close() does the last
        self._index += 1
        self._written = 0

    def write(self, t: torch.Tensor) -> Tuple[int, int]:
        if self._file is None:
            self.open_next()
        raw = t.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
        start = self._written
        for off in range(0, raw.size, self.chunks.nbytes):
            chunk = self.chunks.obtain()  # clean: relinquished every round
            n = min(self.chunks.nbytes, raw.size - off)
            chunk[:n] = raw[off : off + n].tobytes()
            self._file.write(memoryview(chunk)[:n])
            self.chunks.relinquish(chunk)
            self._written += n
        return self._index - 1, start

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Manifest:
    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._entries: Dict[str, Tuple[int, int]] = {}

    def add(self, name: str, where: Tuple[int, int], overwrite: bool = False) -> bool:
        self._lock.acquire()  # leak: a duplicate name returns while the lock is held
        if name in self._entries and not overwrite:
            logger.warning("duplicate %s", name)
            return False
        self._entries[name] = where
        self._lock.release()
        return True

    def flush(self) -> None:
        if not self._lock.acquire(timeout=10):  # clean: near miss, False means not taken, finally releases
            return
        try:
            with open(self.path + ".tmp", "w") as f:  # clean: with block
                json.dump(self._entries, f)
            os.replace(self.path + ".tmp", self.path)
        finally:
            self._lock.release()


def verify_shard(path: str, chunks: ChunkPool, expected: int) -> bool:
    chunk = chunks.obtain()  # leak: a vanished file is reported without giving the chunk back
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        logger.error("%s vanished", path)
        return False
    ok = size == expected and size <= len(chunk) * 1024
    chunks.relinquish(chunk)
    return ok


def checksum(paths: List[str], chunks: ChunkPool) -> Dict[str, int]:
    sums: Dict[str, int] = {}
    chunk = chunks.obtain()  # clean: near miss, the continue stays inside the loop
    for path in paths:
        if not os.path.exists(path):
            continue
        f = open(path, "rb")  # leak: an empty shard continues without close
        n = f.readinto(chunk)
        if n == 0:
            continue
        total = 0
        while n:
            total = (total + sum(chunk[:n])) & 0xFFFFFFFF
            n = f.readinto(chunk)
        f.close()
        sums[path] = total
    chunks.relinquish(chunk)
    return sums


def save_state(state: Dict[str, torch.Tensor], writer: ShardWriter, manifest: Manifest, limit: int) -> None:
    used = 0
    for name, t in state.items():
        if used + t.nbytes > limit and used:
            writer.open_next()
            used = 0
        manifest.add(name, writer.write(t))
        used += t.nbytes
    writer.close()
    manifest.flush()


def read_header(path: str, chunks: ChunkPool) -> Optional[dict]:
    chunk = chunks.obtain()  # leak: the decoded header is returned and the chunk forgotten
    with open(path, "rb") as f:  # clean: with block
        n = f.readinto(chunk)
    try:
        return json.loads(bytes(chunk[:n]))
    except ValueError:
        chunks.relinquish(chunk)
        return None
