"""KV blocks over three tiers (device, host, nvme) with demotion and prefetch."""
from __future__ import annotations

import enum
import logging
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16


class Tier(enum.Enum):
    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class TierAllocator:
    def __init__(self, tier: Tier, num_blocks: int) -> None:
        self.tier = tier
        self._free = list(range(num_blocks))
        self._refs = [0] * num_blocks
        self.payload: dict[int, bytes] = {}

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(n)]
        for b in blocks:
            self._refs[b] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self._refs[b] += 1

    def free(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self._refs[b] -= 1
            if self._refs[b] == 0:
                self.payload.pop(b, None)
                self._free.append(b)


@dataclass
class SeqEntry:
    tier: Tier
    blocks: list[int]
    crc: int = 0


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class TieredKV:
    def __init__(self, gpu: TierAllocator, host: TierAllocator, disk: TierAllocator) -> None:
        self.gpu, self.host, self.disk = gpu, host, disk
        self.entries: dict[str, SeqEntry] = {}

    def reserve(self, seq_id: str, num_tokens: int) -> bool:
        blocks = self.gpu.alloc(blocks_for(num_tokens))  # clean: stored in the entry, drop frees the gpu tier
        if blocks is None:
            return False
        self.entries[seq_id] = SeqEntry(Tier.GPU, blocks)
        return True

    def grow(self, seq_id: str, n: int) -> bool:
        entry = self.entries[seq_id]
        if entry.tier is not Tier.GPU:
            return False
        more = self.gpu.alloc(n)  # clean: near miss, appended to the entry's blocks
        if more is None:
            return False
        entry.blocks += more
        return True

    def demote(self, seq_id: str) -> bool:
        entry = self.entries[seq_id]
        if entry.tier is not Tier.GPU:
            return False
        dst = self.host.alloc(len(entry.blocks))  # clean: near miss, gpu blocks are freed before the entry is rebound
        if dst is None:
            return False
        entry.crc = self._copy(self.gpu, entry.blocks, self.host, dst)
        self.gpu.free(entry.blocks)
        entry.tier, entry.blocks = Tier.HOST, dst
        return True

    def promote(self, seq_id: str) -> bool:
        entry = self.entries[seq_id]
        if entry.tier is not Tier.HOST:
            return False
        dst = self.gpu.alloc(len(entry.blocks))  # leak: on a checksum mismatch the device blocks are not freed
        if dst is None:
            return False
        if self._copy(self.host, entry.blocks, self.gpu, dst) != entry.crc:
            logger.error("checksum mismatch promoting %s", seq_id)
            return False
        self.host.free(entry.blocks)
        entry.tier, entry.blocks = Tier.GPU, dst
        return True

    def spill(self, seq_id: str) -> bool:
        entry = self.entries[seq_id]
        if entry.tier is not Tier.HOST:
            return False
        slots = self.disk.alloc(len(entry.blocks))  # leak: drop() has no branch for the disk tier
        if slots is None:
            return False
        self._copy(self.host, entry.blocks, self.disk, slots)
        self.host.free(entry.blocks)
        entry.tier, entry.blocks = Tier.DISK, slots
        return True

    def fork(self, parent: str, child: str) -> bool:
        entry = self.entries[parent]
        if entry.tier is not Tier.GPU:
            return False
        self.gpu.retain(entry.blocks)  # clean: the child's entry carries this reference and drop frees it
        self.entries[child] = SeqEntry(Tier.GPU, list(entry.blocks))
        return True

    def fork_many(self, parent: str, children: list[str]) -> int:
        entry = self.entries[parent]
        made = 0
        for child in children:
            self.gpu.retain(entry.blocks)  # leak: a child already known is skipped with its reference taken
            if child in self.entries:
                continue
            self.entries[child] = SeqEntry(Tier.GPU, list(entry.blocks))
            made += 1
        return made

    def prefetch(self, wanted: dict[str, int], min_batch: int) -> int:
        staged: list[tuple[str, list[int]]] = []
        for seq_id, n in wanted.items():
            if seq_id in self.entries:
                continue
            blocks = self.gpu.alloc(n)  # leak: below min_batch the staged blocks are forgotten
            if blocks is None:
                break
            staged.append((seq_id, blocks))
        if len(staged) < min_batch:
            return 0
        for seq_id, blocks in staged:
            self.entries[seq_id] = SeqEntry(Tier.GPU, blocks)
        return len(staged)

    def prefetch_all(self, wanted: dict[str, int]) -> bool:
        staged: dict[str, list[int]] = {}
        for seq_id, n in wanted.items():
            if seq_id in self.entries:
                continue
            blocks = self.gpu.alloc(n)  # clean: near miss, a failure frees everything staged so far
            if blocks is None:
                for held in staged.values():
                    self.gpu.free(held)
                return False
            staged[seq_id] = blocks
        for seq_id, held in staged.items():
            self.entries[seq_id] = SeqEntry(Tier.GPU, held)
        return True

    def checkpoint(self, seq_id: str, path: Path) -> bool:
        entry = self.entries[seq_id]
        tmp = self.host.alloc(len(entry.blocks))  # clean: near miss, finally frees on the handled OSError too
        if tmp is None:
            return False
        try:
            self._copy(self.gpu, entry.blocks, self.host, tmp)
            path.write_bytes(b"".join(self.host.payload[b] for b in tmp))
        except OSError as exc:
            logger.warning("checkpoint of %s failed: %s", seq_id, exc)
            return False
        finally:
            self.host.free(tmp)
        return True

    def drop(self, seq_id: str) -> None:
        entry = self.entries.pop(seq_id, None)
        if entry is None:
            return
        if entry.tier is Tier.GPU:
            self.gpu.free(entry.blocks)
        elif entry.tier is Tier.HOST:
            self.host.free(entry.blocks)

    @staticmethod
    def _copy(src: TierAllocator, frm: list[int], dst: TierAllocator, to: list[int]) -> int:
        crc = 0
        for a, b in zip(frm, to):
            dst.payload[b] = src.payload.get(a, b"")
            crc = zlib.crc32(dst.payload[b], crc)
        return crc
