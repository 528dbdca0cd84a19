"""Moves KV blocks between the device tier and the host tier."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Iterable, NamedTuple, Optional

import torch

logger = logging.getLogger(__name__)


class Block(NamedTuple):
    tier: str
    index: int


class Tier:
    """One tensor per tier and a bitmap of the blocks in use."""

    def __init__(self, name: str, num_blocks: int, block_numel: int) -> None:
        self.name = name
        self.store = torch.zeros(num_blocks, block_numel)
        self._used = [False] * num_blocks
        self._hint = 0

    def alloc(self) -> Optional[Block]:
        n = len(self._used)
        for step in range(n):
            i = (self._hint + step) % n
            if not self._used[i]:
                self._used[i] = True  # clean: returned as a Block
                self._hint = i + 1
                return Block(self.name, i)
        return None

    def alloc_run(self, length: int) -> Optional[list[Block]]:
        """``length`` neighbouring blocks."""
        run = 0
        for i, used in enumerate(self._used):
            run = 0 if used else run + 1
            if run == length:
                first = i - length + 1
                self._used[first : i + 1] = [True] * length  # clean: returned as a list of Blocks
                return [Block(self.name, j) for j in range(first, i + 1)]
        return None

    def free(self, block: Block) -> None:
        if not self._used[block.index]:
            raise ValueError(f"double free of {block}")
        self._used[block.index] = False


@dataclass
class HashEntry:
    digest: bytes
    block: Block
    hits: int = 0


class OffloadManager:
    """Host copies of device blocks, found by content hash, evicted LRU."""

    def __init__(self, device: Tier, host: Tier) -> None:
        self.device = device
        self.host = host
        self._host_index: OrderedDict[bytes, HashEntry] = OrderedDict()

    def _host_block(self) -> Optional[Block]:
        block = self.host.alloc()  # clean: near miss, None at first, then either one is handed to the caller
        if block is not None:
            return block
        if not self._host_index:
            return None
        _, victim = self._host_index.popitem(last=False)
        self.host.free(victim.block)
        return self.host.alloc()  # clean: handed to the caller

    def offload(self, digest: bytes, src: Block) -> bool:
        """Copy a device block to the host and free it on the device."""
        if digest in self._host_index:
            self._host_index.move_to_end(digest)
            self.device.free(src)
            return True
        dst = self._host_block()  # clean: goes into the index, evicted or cleared from there
        if dst is None:
            return False
        self.host.store[dst.index].copy_(self.device.store[src.index])
        self._host_index[digest] = HashEntry(digest, dst)
        self.device.free(src)
        return True

    def mirror(self, digest: bytes, src: Block) -> bool:
        """Copy a device block to the host, keeping the device one."""
        dst = self._host_block()  # leak: a digest that is indexed already has its entry overwritten
        if dst is None:
            return False
        self.host.store[dst.index].copy_(self.device.store[src.index])
        self._host_index[digest] = HashEntry(digest, dst)
        return True

    def load(self, digests: Iterable[bytes]) -> list[Block]:
        """Bring the longest known prefix back to the device."""
        loaded: list[Block] = []
        for digest in digests:
            dst = self.device.alloc()  # leak: a miss on the host breaks with the device block unused
            if dst is None:
                break
            entry = self._host_index.get(digest)
            if entry is None:
                break
            entry.hits += 1
            self.device.store[dst.index].copy_(self.host.store[entry.block.index])
            loaded.append(dst)
        return loaded

    def load_one(self, digest: bytes) -> Optional[Block]:
        entry = self._host_index.get(digest)
        dst = self.device.alloc() if entry is not None else None  # clean: near miss, allocated only for a known entry, then returned
        if dst is None:
            return None
        self.device.store[dst.index].copy_(self.host.store[entry.block.index])
        return dst

    def promote(self, digest: bytes) -> Optional[Block]:
        """Move a block up: the host copy goes away."""
        dst = self.load_one(digest)  # clean: returned to the caller
        if dst is not None:
            entry = self._host_index.pop(digest)
            self.host.free(entry.block)
        return dst

    def clear(self) -> None:
        while self._host_index:
            _, entry = self._host_index.popitem()
            self.host.free(entry.block)


class Compactor:
    """Rewrites scattered device blocks into one run."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def compact(self, blocks: list[Block]) -> list[Block]:
        run = self.tier.alloc_run(len(blocks))  # clean: near miss, it takes the place of the old blocks in the result
        if run is None:
            return blocks
        for old, new in zip(blocks, run):
            self.tier.store[new.index].copy_(self.tier.store[old.index])
            self.tier.free(old)
        return run

    def defragmented_sum(self, blocks: list[Block]) -> float:
        run = self.tier.alloc_run(len(blocks))  # leak: only the first block of the run is freed
        if run is None:
            return float(sum(self.tier.store[b.index].sum() for b in blocks))
        for old, new in zip(blocks, run):
            self.tier.store[new.index].copy_(self.tier.store[old.index])
        first, last = run[0].index, run[-1].index
        total = float(self.tier.store[first : last + 1].sum())
        self.tier.free(run[0])
        return total


def scratch_block(tier: Tier, table: dict[str, Block], owner: str) -> Optional[Block]:
    """The scratch block of an owner, from the table or new."""
    block = tier.alloc()  # leak: setdefault keeps an older block of the owner and the new one is lost
    if block is None:
        return table.get(owner)
    return table.setdefault(owner, block)


def swap_tables(manager: OffloadManager, tables: dict[str, list[Block]], digests: dict[str, list[bytes]]) -> None:
    """Reload the block tables of requests that were swapped out."""
    for req_id, wanted in digests.items():
        if tables.get(req_id):
            continue
        blocks = manager.load(wanted)  # leak: a partial load is dropped by the continue
        if len(blocks) < len(wanted):
            continue
        tables[req_id] = blocks
