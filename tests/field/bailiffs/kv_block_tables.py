"""Paged KV cache: block tables per sequence, sharing on fork, swapping to host memory."""
from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def take_many(self, count: int) -> list[int] | None:
        if len(self._free) < count:
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class SequenceTable:
    """Self-attention blocks; one list of blocks per sequence."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def admit(self, seq_id: str, prompt_len: int) -> bool:
        need = blocks_for(prompt_len, self._pool.block_size)
        blocks = self._pool.take_many(need)  # clean: kept in the table, finish drops each block
        if blocks is None:
            return False
        self._tables[seq_id] = blocks
        self._lens[seq_id] = prompt_len
        return True

    def append_token(self, seq_id: str) -> bool:
        length = self._lens[seq_id]
        if length % self._pool.block_size == 0:
            block = self._pool.take()  # clean: near miss, joins the table that finish walks to its end
            if block is None:
                return False
            self._tables[seq_id].append(block)
        self._lens[seq_id] = length + 1
        return True

    def fork(self, parent: str, child: str) -> None:
        shared = [self._pool.share(b) for b in self._tables[parent]]  # clean: the child's table drops them
        self._tables[child] = shared
        self._lens[child] = self._lens[parent]

    def truncate(self, seq_id: str, new_len: int) -> None:
        keep = blocks_for(new_len, self._pool.block_size)
        table = self._tables[seq_id]
        for block in table[keep:]:
            self._pool.drop(block)
        del table[keep:]
        self._lens[seq_id] = new_len

    def finish(self, seq_id: str) -> None:
        self._lens.pop(seq_id, None)
        for block in reversed(self._tables.pop(seq_id, [])):
            self._pool.drop(block)


@dataclass
class EncoderEntry:
    enc_len: int
    blocks: list[int] = field(default_factory=list)


class CrossAttentionTable:
    """Blocks of the encoder side, written once per request."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[str, EncoderEntry] = {}

    def admit(self, seq_id: str, enc_len: int) -> bool:
        need = blocks_for(enc_len, self._pool.block_size)
        blocks = self._pool.take_many(need)  # leak: finish drops only the full blocks, not the last partial one
        if blocks is None:
            log.debug("no encoder blocks for %s", seq_id)
            return False
        self._entries[seq_id] = EncoderEntry(enc_len, blocks)
        return True

    def finish(self, seq_id: str) -> None:
        entry = self._entries.pop(seq_id, None)
        if entry is None:
            return
        full = entry.enc_len // self._pool.block_size
        for block in entry.blocks[:full]:
            self._pool.drop(block)


@dataclass
class Swapped:
    tokens: int
    host_blocks: list[int]


class SwapManager:
    def __init__(self, gpu: BlockPool, host: BlockPool, window: int) -> None:
        self._gpu = gpu
        self._host = host
        self._window = window
        self._swapped: dict[str, Swapped] = {}
        self.copied = 0

    def _copy(self, src: int, dst: int) -> None:
        self.copied += self._gpu.block_size

    def swap_out(self, seq_id: str, tokens: int, gpu_blocks: list[int]) -> bool:
        host_blocks = self._host.take_many(len(gpu_blocks))  # leak: swap_in drops only as many as the window needs
        if host_blocks is None:
            return False
        for src, dst in zip(gpu_blocks, host_blocks):
            self._copy(src, dst)
            self._gpu.drop(src)
        self._swapped[seq_id] = Swapped(tokens, host_blocks)
        return True

    def swap_in(self, seq_id: str) -> list[int] | None:
        rec = self._swapped[seq_id]
        need = blocks_for(min(rec.tokens, self._window), self._gpu.block_size)
        gpu_blocks = self._gpu.take_many(need)  # clean: handed to the caller
        if gpu_blocks is None:
            return None
        for src, dst in zip(rec.host_blocks[-need:], gpu_blocks):
            self._copy(src, dst)
            self._host.drop(src)
        del self._swapped[seq_id]
        return gpu_blocks


def mirror_to_host(gpu_blocks: list[int], host: BlockPool, limit: int) -> int:
    """Measure the host copy rate on at most `limit` blocks."""
    staged = host.take_many(len(gpu_blocks))  # clean: near miss, zip is cut at limit but all staged are dropped
    if staged is None:
        return 0
    copied = 0
    for _src, _dst in zip(gpu_blocks[:limit], staged):
        copied += host.block_size
    for block in staged:
        host.drop(block)
    return copied


def try_collect(pool: BlockPool, count: int) -> list[int] | None:
    """Take blocks one by one, so that a concurrent drop can still help."""
    got: list[int] = []
    while len(got) < count:
        block = pool.take()  # leak: on a refusal the blocks already in got are lost
        if block is None:
            log.info("wanted %d blocks, pool ran dry at %d", count, len(got))
            return None
        got.append(block)
    return got


def try_collect_or_undo(pool: BlockPool, count: int) -> list[int] | None:
    got: list[int] = []
    while len(got) < count:
        block = pool.take()  # clean: near miss, the refusal drops what was collected
        if block is None:
            while got:
                pool.drop(got.pop())
            return None
        got.append(block)
    return got


def warm_up(pool: BlockPool, count: int) -> bool:
    blocks = try_collect_or_undo(pool, count)  # clean: all are dropped after touching
    if not blocks:
        return False
    touched = sum(1 for b in blocks if b >= 0)
    for block in blocks:
        pool.drop(block)
    return touched == count
