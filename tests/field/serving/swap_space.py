"""Swapping of preempted sequences between device and host block pools."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

logger = logging.getLogger(__name__)


class Device(Enum):
    GPU = auto()
    CPU = auto()


class BlockPool:
    """Counter and free stack over a tensor of blocks."""

    def __init__(self, device: Device, n: int, width: int) -> None:
        self.device = device
        self.data = torch.zeros(n, width)
        self._stack: list[int] = list(range(n - 1, -1, -1))

    def can_allocate(self, n: int) -> bool:
        return len(self._stack) >= n

    def allocate(self) -> int:
        return self._stack.pop()

    def allocate_many(self, n: int) -> list[int]:
        """May give fewer than n."""
        got = []
        while self._stack and len(got) < n:
            got.append(self._stack.pop())
        return got

    def free(self, block: int) -> None:
        self._stack.append(block)

    def free_all(self, blocks: list[int]) -> None:
        for b in blocks:
            self.free(b)


@dataclass
class SwapRecord:
    seq_id: int
    src: list[int]
    dst: list[int] = field(default_factory=list)


@dataclass
class SwapManager:
    gpu: BlockPool
    cpu: BlockPool
    out: dict[int, SwapRecord] = field(default_factory=dict)

    def swap_out(self, seq_id: int, blocks: list[int]) -> SwapRecord | None:
        if not self.cpu.can_allocate(len(blocks)):
            return None
        rec = SwapRecord(seq_id, list(blocks))
        for b in blocks:
            h = self.cpu.allocate()  # clean: in the record, which swap_in or discard takes apart
            self.cpu.data[h].copy_(self.gpu.data[b])
            rec.dst.append(h)
        self.discard(seq_id)
        self.gpu.free_all(blocks)
        self.out[seq_id] = rec
        return rec

    def swap_out_partial(self, seq_id: int, blocks: list[int]) -> int:
        host = self.cpu.allocate_many(len(blocks))  # leak: a short answer is given up without freeing what came
        if len(host) < len(blocks):
            logger.info("host pool short by %d blocks", len(blocks) - len(host))
            return 0
        for h, b in zip(host, blocks):
            self.cpu.data[h].copy_(self.gpu.data[b])
        self.gpu.free_all(blocks)
        self.discard(seq_id)
        self.out[seq_id] = SwapRecord(seq_id, blocks, host)
        return len(host)

    def swap_in(self, seq_id: int) -> list[int] | None:
        rec = self.out.get(seq_id)
        if rec is None:
            return None
        dev = self.gpu.allocate_many(len(rec.dst))  # clean: near miss, a short answer is freed, a full one returned
        if len(dev) != len(rec.dst):
            self.gpu.free_all(dev)
            return None
        for d, h in zip(dev, rec.dst):
            self.gpu.data[d].copy_(self.cpu.data[h])
            self.cpu.free(h)
        del self.out[seq_id]
        return dev

    def discard(self, seq_id: int) -> None:
        rec = self.out.pop(seq_id, None)
        if rec:
            self.cpu.free_all(rec.dst)

    def reset(self) -> None:
        for seq_id in list(self.out):
            self.discard(seq_id)

    def exchange(self, seq_id: int, victim: list[int]) -> list[int] | None:
        """Swap one sequence in for another."""
        hold = self.cpu.allocate_many(len(victim))  # leak: when the swap in fails the host blocks are not freed
        for h, b in zip(hold, victim):
            self.cpu.data[h].copy_(self.gpu.data[b])
        self.gpu.free_all(victim[: len(hold)])
        dev = self.swap_in(seq_id)  # clean: returned to the caller
        if dev is None:
            return None
        self.out[seq_id] = SwapRecord(seq_id, victim, hold)
        return dev

    def copy_block(self, src: int) -> int:
        dst = self.gpu.allocate()  # clean: the caller gets it
        self.gpu.data[dst].copy_(self.gpu.data[src])
        return dst

    def double(self, src: int) -> torch.Tensor:
        dst = self.copy_block(src)  # clean: freed after the sum
        res = self.gpu.data[dst] + self.gpu.data[src]
        self.gpu.free(dst)
        return res

    def duplicate_all(self, blocks: list[int]) -> list[int]:
        return [self.copy_block(b) for b in blocks if self.gpu.can_allocate(1)]  # clean: the list goes to the caller

    def verify(self, blocks: list[int]) -> bool:
        dup = self.duplicate_all(blocks)  # leak: a difference returns before the free
        for a, b in zip(blocks, dup):
            if not torch.equal(self.gpu.data[a], self.gpu.data[b]):
                return False
        self.gpu.free_all(dup)
        return True

    def verify_slow(self, blocks: list[int]) -> bool:
        for a in blocks:
            b = self.copy_block(a)  # clean: near miss, compared first, freed next, then the return
            same = torch.equal(self.gpu.data[a], self.gpu.data[b])
            self.gpu.free(b)
            if not same:
                return False
        return True

    def touch(self, src: int) -> None:
        self.copy_block(src)  # leak: the result is discarded
        self.gpu.data[src].add_(0.0)

    def fill_holes(self, table: list[int | None]) -> None:
        for i, entry in enumerate(table):
            if entry is not None:
                continue
            table[i] = self.gpu.allocate()  # clean: moved into the caller's table

    def trim(self, n: int, keep: int) -> list[int]:
        blocks = self.gpu.allocate_many(n)  # leak: the blocks between keep and the last one are never freed
        if len(blocks) > keep:
            self.gpu.free(blocks[-1])
        return blocks[:keep]
