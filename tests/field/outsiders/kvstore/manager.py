from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from .pool import BlockHandle, BlockPool, PoolExhausted

logger = logging.getLogger(__name__)


@dataclass
class Entry:
    key: str
    blocks: list[BlockHandle] = field(default_factory=list)
    nbytes: int = 0
    pinned: bool = False


class KVStore:
    def __init__(self, pool: BlockPool, block_bytes: int) -> None:
        self.pool = pool
        self.block_bytes = block_bytes
        self.entries: dict[str, Entry] = {}

    def put(self, key: str, raw: torch.Tensor) -> bool:
        if key in self.entries:
            return True
        n = -(-raw.numel() // self.block_bytes)
        try:
            blocks = self.pool.allocate_many(n, key)  # clean: entered in the store, delete() frees them
        except PoolExhausted:
            return False
        for i, b in enumerate(blocks):
            part = raw[i * self.block_bytes:(i + 1) * self.block_bytes]
            b.view[: part.numel()].copy_(part)
        self.entries[key] = Entry(key, blocks, raw.numel())
        return True

    def put_if_complete(self, key: str, raw: torch.Tensor, expected: int) -> bool:
        n = -(-raw.numel() // self.block_bytes)
        blocks = self.pool.allocate_many(n, key)  # leak: a short payload is refused after the blocks are there
        if raw.numel() != expected:
            logger.warning("%s: %d bytes instead of %d", key, raw.numel(), expected)
            return False
        for i, b in enumerate(blocks):
            part = raw[i * self.block_bytes:(i + 1) * self.block_bytes]
            b.view[: part.numel()].copy_(part)
        self.delete(key)
        self.entries[key] = Entry(key, blocks, raw.numel())
        return True

    def get(self, key: str) -> torch.Tensor | None:
        e = self.entries.get(key)
        if e is None:
            return None
        return torch.cat([b.view for b in e.blocks])[: e.nbytes].clone()

    def append(self, key: str, raw: torch.Tensor) -> None:
        e = self.entries[key]
        off = 0
        while off < raw.numel():
            b = self.pool.allocate(key)  # clean: added to the entry
            part = raw[off:off + self.block_bytes]
            b.view[: part.numel()].copy_(part)
            e.blocks.append(b)
            off += part.numel()
        e.nbytes += raw.numel()

    def delete(self, key: str) -> bool:
        e = self.entries.pop(key, None)
        if e is None:
            return False
        self.pool.free_many(e.blocks)
        return True

    def clear(self) -> None:
        for key in list(self.entries):
            self.delete(key)
