"""NVMe tier of the KV cache: one file per block group, host buffers from a fixed pool."""
from __future__ import annotations

import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

logger = logging.getLogger(__name__)

MAGIC = b"KVB1"


@dataclass
class TierConfig:
    root: Path
    block_bytes: int = 1 << 20
    host_buffers: int = 16
    verify: bool = True


class HostPool:
    def __init__(self, cfg: TierConfig) -> None:
        self.cfg = cfg
        self._free = [bytearray(cfg.block_bytes) for _ in range(cfg.host_buffers)]

    def borrow(self) -> bytearray | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, buf: bytearray) -> None:
        self._free.append(buf)


class DiskTier:
    def __init__(self, cfg: TierConfig) -> None:
        self.cfg = cfg
        self.pool = HostPool(cfg)
        self.handles: dict[int, BinaryIO] = {}
        self.hits = 0
        self.misses = 0

    def _path(self, group: int) -> Path:
        return self.cfg.root / f"{group:08x}.kv"

    def store(self, group: int, block: torch.Tensor) -> bool:
        buf = self.pool.borrow()  # clean: every way out after the None check passes give_back
        if buf is None:
            return False
        raw = block.contiguous().view(torch.uint8).numpy().tobytes()
        buf[: len(raw)] = raw
        with open(self._path(group), "wb") as f:  # clean: with block
            f.write(MAGIC + struct.pack("<I", len(raw)))
            f.write(memoryview(buf)[: len(raw)])
        self.pool.give_back(buf)
        return True

    def load(self, group: int, dst: torch.Tensor) -> bool:
        path = self._path(group)
        buf = self.pool.borrow()  # leak: a miss returns without giving it back
        if buf is None:
            return False
        if not path.exists():
            self.misses += 1
            return False
        with open(path, "rb") as f:  # clean: with block
            f.seek(8)
            n = f.readinto(buf)
        dst.view(torch.uint8).flatten()[:n].copy_(torch.frombuffer(buf, dtype=torch.uint8)[:n])
        self.pool.give_back(buf)
        self.hits += 1
        return True

    def load_verified(self, group: int, dst: torch.Tensor) -> bool:
        f = open(self._path(group), "rb")  # leak: a header mismatch returns with the file open
        if self.cfg.verify and f.read(4) != MAGIC:
            logger.error("bad header in group %d", group)
            return False
        (n,) = struct.unpack("<I", f.read(4))
        data = f.read(n)
        f.close()
        dst.view(torch.uint8).flatten()[:n].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return True

    def read_length(self, group: int) -> int:
        f = open(self._path(group), "rb")  # clean: near miss, the early return sits inside try/finally
        try:
            if f.read(4) != MAGIC:
                return -1
            return struct.unpack("<I", f.read(4))[0]
        finally:
            f.close()

    def handle(self, group: int) -> BinaryIO:
        h = self.handles.get(group)
        if h is None:
            h = open(self._path(group), "rb")  # clean: cached in handles, close() closes all
            self.handles[group] = h
        return h

    def drop_group(self, group: int) -> None:
        h = self.handles.pop(group, None)
        if h is not None:
            h.close()
        os.unlink(self._path(group))

    def load_many(self, groups: list[int], dst: list[torch.Tensor]) -> int:
        loaded = 0
        for group, t in zip(groups, dst):
            buf = self.pool.borrow()  # leak: an OSError is logged and the buffer of this round is forgotten
            if buf is None:
                break
            try:
                h = self.handle(group)
                h.seek(8)
                n = h.readinto(buf)
                if not n:
                    raise OSError("empty group")
                t.view(torch.uint8).flatten()[:n].copy_(torch.frombuffer(buf, dtype=torch.uint8)[:n])
                self.pool.give_back(buf)
                loaded += 1
            except OSError:
                logger.exception("group %d unreadable", group)
        return loaded

    def prefetch(self, groups: list[int]) -> dict[int, bytearray]:
        staged: dict[int, bytearray] = {}
        for group in groups:
            if group in staged:
                continue
            buf = self.pool.borrow()  # clean: handed to the caller in the dict
            if buf is None:
                break
            self.handle(group).readinto(buf)
            staged[group] = buf
        return staged

    def warm(self, groups: list[int]) -> int:
        staged = self.prefetch(groups)  # clean: every buffer of the dict goes back
        total = sum(len(b) for b in staged.values())
        for b in staged.values():
            self.pool.give_back(b)
        return total

    def peek(self, groups: list[int]) -> bytes:
        staged = self.prefetch(groups)  # leak: the first group's buffer is returned, the others are not
        if not staged:
            return b""
        first = staged[groups[0]]
        head = bytes(first[:16])
        self.pool.give_back(first)
        return head

    def checksum(self, group: int) -> int:
        return sum(open(self._path(group), "rb").read()) & 0xFFFFFFFF  # leak: the file object is never closed

    def close(self) -> None:
        for h in self.handles.values():
            h.close()
        self.handles.clear()
