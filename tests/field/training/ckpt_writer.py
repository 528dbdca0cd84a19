"""Sharded checkpoint writer: one staging buffer per shard, files written by rank."""
from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class CheckpointConfig:
    directory: Path
    shard_bytes: int = 1 << 24
    fsync: bool = False
    max_buffers: int = 4


class ShardBufferPool:
    def __init__(self, cfg: CheckpointConfig) -> None:
        self._store: List[bytearray] = [bytearray(cfg.shard_bytes) for _ in range(cfg.max_buffers)]
        self._sem = threading.Semaphore(cfg.max_buffers)
        self._mu = threading.Lock()

    def rent(self) -> bytearray:
        self._sem.acquire()  # clean: give_back() releases the semaphore
        with self._mu:
            return self._store.pop()

    def give_back(self, buf: bytearray) -> None:
        with self._mu:
            self._store.append(buf)
        self._sem.release()


class CheckpointWriter:
    def __init__(self, cfg: CheckpointConfig, rank: int) -> None:
        self.cfg = cfg
        self.rank = rank
        self.pool = ShardBufferPool(cfg)
        self._index: Optional[BinaryIO] = None
        self._log = None

    def __enter__(self) -> "CheckpointWriter":
        self._index = open(self.cfg.directory / f"index_{self.rank}.bin", "wb")  # clean: closed by __exit__
        self._log = open(self.cfg.directory / f"log_{self.rank}.txt", "a")  # leak: __exit__ returns early on an error before closing it
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self._index is not None:
            self._index.close()
        if exc_type is not None:
            logger.error("checkpoint aborted: %s", exc)
            return False
        self._log.close()
        return False

    def write_shard(self, name: str, state: Dict[str, torch.Tensor]) -> int:
        buf = self.pool.rent()  # clean: the finally gives it back
        try:
            used = self._fill(buf, state)
            path = self.cfg.directory / f"{name}.{self.rank}.shard"
            with open(path, "wb") as fh:  # clean: with statement
                fh.write(memoryview(buf)[:used])
                if self.cfg.fsync:
                    os.fsync(fh.fileno())
            return used
        finally:
            self.pool.give_back(buf)

    def write_optimizer(self, state: Dict[str, torch.Tensor]) -> int:
        fh = open(self.cfg.directory / f"optim_{self.rank}.shard", "wb")  # leak: an empty state returns before the close
        if not state:
            return 0
        total = 0
        for key in sorted(state):
            data = state[key].cpu().numpy().tobytes()
            fh.write(data)
            total += len(data)
        fh.close()
        return total

    def write_meta(self, meta: dict) -> None:
        fh = open(self.cfg.directory / f"meta_{self.rank}.json", "w")  # clean: closed on the only path
        fh.write(json.dumps(meta, sort_keys=True))
        fh.close()

    def verify(self, name: str, expected: int) -> bool:
        fh = open(self.cfg.directory / f"{name}.{self.rank}.shard", "rb")  # clean: near miss, both returns close first
        fh.seek(0, os.SEEK_END)
        if fh.tell() != expected:
            logger.error("%s truncated", name)
            fh.close()
            return False
        fh.close()
        return True

    def dedupe(self, name: str, state: Dict[str, torch.Tensor], seen: Dict[int, str]) -> Optional[str]:
        buf = self.pool.rent()  # leak: a duplicate shard returns with the buffer still out
        used = self._fill(buf, state)
        digest = hash(bytes(buf[:used]))
        if digest in seen:
            return seen[digest]
        seen[digest] = name
        self.pool.give_back(buf)
        return None

    def compress(self, state: Dict[str, torch.Tensor]) -> bytes:
        import zlib

        buf = self.pool.rent()  # leak: rebound to the sliced copy, the rented bytearray is lost
        used = self._fill(buf, state)
        buf = bytes(buf[:used])
        return zlib.compress(buf)

    def compress_view(self, state: Dict[str, torch.Tensor]) -> bytes:
        import zlib

        buf = self.pool.rent()  # clean: near miss, the memoryview does not replace the buffer
        used = self._fill(buf, state)
        window = memoryview(buf)[:used]
        blob = zlib.compress(window)
        window.release()
        self.pool.give_back(buf)
        return blob

    def _fill(self, buf: bytearray, state: Dict[str, torch.Tensor]) -> int:
        pos = 0
        for key in sorted(state):
            data = state[key].cpu().numpy().tobytes()
            buf[pos : pos + len(data)] = data
            pos += len(data)
        return pos


def load_header(path: Path) -> dict:
    return json.loads(open(path).readline())  # leak: the file object is never closed explicitly


def merge_logs(paths: List[Path], target: Path) -> int:
    count = 0
    out = open(target, "w")  # clean: closed after the loop
    for p in paths:
        src = open(p)  # leak: an empty log is skipped without a close
        first = src.readline()
        if not first:
            continue
        out.write(first)
        for line in src:
            out.write(line)
            count += 1
        src.close()
    out.close()
    return count
