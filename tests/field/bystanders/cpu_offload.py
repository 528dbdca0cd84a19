"""Swap KV blocks between device and host."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

import torch

log = logging.getLogger(__name__)


class HostBlockPool:
    def __init__(self, n: int) -> None:
        self._avail: Set[int] = set(range(n))

    def alloc(self) -> Optional[int]:
        return self._avail.pop() if self._avail else None

    def alloc_n(self, n: int) -> Optional[List[int]]:
        if len(self._avail) < n:
            return None
        return [self._avail.pop() for _ in range(n)]

    def alloc_up_to(self, n: int) -> List[int]:
        return [self._avail.pop() for _ in range(min(n, len(self._avail)))]

    def dealloc(self, block: int) -> None:
        self._avail.add(block)

    def dealloc_many(self, blocks: List[int]) -> None:
        self._avail.update(blocks)


@dataclass
class SwapRecord:
    seq_id: int
    host: List[int] = field(default_factory=list)
    length: int = 0


class Offloader:
    def __init__(self, host: torch.Tensor, device: torch.Tensor, pool: HostBlockPool) -> None:
        self.host = host
        self.device = device
        self.pool = pool
        self.records: Dict[int, SwapRecord] = {}

    def _copy_out(self, src: List[int], dst: List[int]) -> None:
        for s, d in zip(src, dst):
            self.host[d].copy_(self.device[s], non_blocking=True)

    def _copy_in(self, src: List[int], dst: List[int]) -> None:
        for s, d in zip(src, dst):
            self.device[d].copy_(self.host[s], non_blocking=True)

    def swap_out(self, seq_id: int, blocks: List[int]) -> bool:
        host = self.pool.alloc_n(len(blocks))  # clean: stored in the record, swap_in frees
        if host is None:
            return False
        self._copy_out(blocks, host)
        self.records[seq_id] = SwapRecord(seq_id, host, len(blocks))
        return True

    def swap_in(self, seq_id: int, blocks: List[int]) -> None:
        rec = self.records.pop(seq_id)
        self._copy_in(rec.host, blocks)
        self.pool.dealloc_many(rec.host)

    def swap_out_partial(self, seq_id: int, blocks: List[int]) -> int:
        host = self.pool.alloc_up_to(len(blocks))  # leak: with fewer blocks than half the partial grant is dropped
        if len(host) < len(blocks) // 2:
            log.info("sequence %d stays on the device", seq_id)
            return 0
        self._copy_out(blocks, host)
        self.records[seq_id] = SwapRecord(seq_id, host, len(host))
        return len(host)

    def swap_out_greedy(self, seq_id: int, blocks: List[int]) -> int:
        host = self.pool.alloc_up_to(len(blocks))  # clean: near miss, the empty grant is the only one dropped
        if not host:
            return 0
        self._copy_out(blocks, host)
        self.records[seq_id] = SwapRecord(seq_id, host, len(host))
        return len(host)

    def copy_on_write(self, seq_id: int, idx: int) -> Optional[int]:
        rec = self.records.get(seq_id)
        if rec is None:
            return None
        new = self.pool.alloc()  # leak: an index past the record returns None with the new block
        if new is None:
            return None
        if idx >= len(rec.host):
            return None
        shared = rec.host[idx]
        self.host[new].copy_(self.host[shared])
        rec.host[idx] = new
        self.pool.dealloc(shared)
        return new

    def relocate(self, seq_id: int, idx: int) -> bool:
        rec = self.records[seq_id]
        new = self.pool.alloc()  # clean: near miss, the old block of the entry is freed after the exchange
        if new is None:
            return False
        self.host[new].copy_(self.host[rec.host[idx]])
        old, rec.host[idx] = rec.host[idx], new
        self.pool.dealloc(old)
        return True

    def checkpoint(self, blocks: List[int], path: str) -> bool:
        host = self.pool.alloc_n(len(blocks))  # leak: only the first block is given back
        if host is None:
            return False
        self._copy_out(blocks, host)
        torch.save([self.host[h].clone() for h in host], path)
        self.pool.dealloc(host[0])
        return True

    def digest(self, blocks: List[int]) -> List[float]:
        host = self.pool.alloc_up_to(len(blocks))  # clean: both slices are freed
        self._copy_out(blocks, host)
        sums = [float(self.host[h].sum()) for h in host]
        half = len(host) // 2
        self.pool.dealloc_many(host[:half])
        self.pool.dealloc_many(host[half:])
        return sums

    def drop(self, seq_id: int) -> None:
        rec = self.records.pop(seq_id, None)
        if rec is not None:
            self.pool.dealloc_many(rec.host)

    def drop_all(self) -> None:
        for seq_id in list(self.records):
            self.drop(seq_id)
