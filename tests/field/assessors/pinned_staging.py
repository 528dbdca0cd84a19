"""Pinned host staging blocks for host-to-device batch copies."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Optional, Sequence

import torch


@dataclass(eq=False)
class PinnedBlock:
    storage: torch.Tensor
    nbytes: int
    event: Optional[torch.cuda.Event] = None

    def view_as(self, t: torch.Tensor) -> torch.Tensor:
        need = t.numel() * t.element_size()
        return self.storage[:need].view(t.dtype).view(t.shape)


class PinnedPool:
    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self.block_bytes = block_bytes
        self._lock = threading.Lock()
        self._free: deque[PinnedBlock] = deque(
            PinnedBlock(torch.empty(block_bytes, dtype=torch.uint8, pin_memory=True), block_bytes)
            for _ in range(num_blocks)
        )

    def take(self, nbytes: int) -> Optional[PinnedBlock]:
        if nbytes > self.block_bytes:
            return None
        with self._lock:
            if not self._free:
                return None
            return self._free.popleft()

    def take_idle(self) -> Optional[PinnedBlock]:
        with self._lock:
            for _ in range(len(self._free)):
                block = self._free.popleft()  # leak: a block whose event is still pending is popped and never put back
                if block.event is None or block.event.query():
                    block.event = None
                    return block
            return None

    def give(self, block: PinnedBlock) -> None:
        with self._lock:
            self._free.append(block)

    def give_front(self, block: PinnedBlock) -> None:
        with self._lock:
            self._free.appendleft(block)


def nbytes_of(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


class HostToDevice:
    def __init__(self, pool: PinnedPool, device: torch.device) -> None:
        self.pool = pool
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._inflight: deque[PinnedBlock] = deque()
        self._scratch: Optional[PinnedBlock] = None

    def _ship(self, block: PinnedBlock, src: torch.Tensor) -> torch.Tensor:
        staged = block.view_as(src)
        staged.copy_(src)
        with torch.cuda.stream(self.stream):
            out = staged.to(self.device, non_blocking=True)
            block.event = torch.cuda.Event()
            block.event.record(self.stream)
        self._inflight.append(block)
        return out

    def reap(self) -> int:
        done = 0
        while self._inflight and self._inflight[0].event.query():
            block = self._inflight.popleft()
            block.event = None
            self.pool.give(block)
            done += 1
        return done

    def copy(self, src: torch.Tensor) -> torch.Tensor:
        block = self.pool.take(nbytes_of(src))  # clean: _ship queues it in flight and reap gives it back
        if block is None:
            return src.to(self.device)
        return self._ship(block, src)

    def copy_pair(self, ids: torch.Tensor, mask: torch.Tensor) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        first = self.pool.take(nbytes_of(ids))  # leak: when the second take fails the first block is dropped
        if first is None:
            return None
        second = self.pool.take(nbytes_of(mask))  # clean: either None or shipped below
        if second is None:
            return None
        return self._ship(first, ids), self._ship(second, mask)

    def copy_many(self, tensors: Sequence[torch.Tensor]) -> Optional[list[torch.Tensor]]:
        blocks: list[PinnedBlock] = []
        for t in tensors:
            block = self.pool.take(nbytes_of(t))  # clean: near miss, a failure in the middle gives back all taken so far
            if block is None:
                for b in reversed(blocks):
                    self.pool.give_front(b)
                return None
            blocks.append(block)
        return [self._ship(b, t) for b, t in zip(blocks, tensors)]

    def copy_ragged(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for part in parts:
            block = self.pool.take(nbytes_of(part))  # leak: an empty part continues with the block still held
            if block is None:
                out.append(part.to(self.device))
                continue
            if part.numel() == 0:
                out.append(torch.empty_like(part, device=self.device))
                continue
            out.append(self._ship(block, part))
        return out

    def copy_padded(self, rows: Sequence[torch.Tensor], width: int) -> Optional[torch.Tensor]:
        block = self.pool.take(len(rows) * width * 8)  # clean: near miss, the too-wide row path gives it back before returning
        if block is None:
            return None
        host = block.storage[: len(rows) * width * 8].view(torch.int64).view(len(rows), width)
        host.zero_()
        for i, row in enumerate(rows):
            if row.numel() > width:
                self.pool.give_front(block)
                return None
            host[i, : row.numel()].copy_(row)
        out = host.to(self.device)
        self.pool.give(block)
        return out

    def checksum(self, src: torch.Tensor) -> int:
        block = self.pool.take_idle()  # clean: given back in the finally clause
        if block is None:
            return int(src.to(torch.int64).sum().item())
        try:
            staged = block.view_as(src)
            staged.copy_(src)
            return int(staged.to(torch.int64).sum().item())
        finally:
            self.pool.give(block)

    def scratch(self, nbytes: int) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = self.pool.take(self.pool.block_bytes)  # clean: near miss, only None is ever replaced and close gives it back
        if self._scratch is None or nbytes > self._scratch.nbytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch.storage[:nbytes]

    def warmup(self, steps: int) -> None:
        probe = self.pool.take(self.pool.block_bytes)  # clean: every later take is preceded by a give and the last one is given after the loop
        for _ in range(steps):
            if probe is None:
                return
            probe.storage.to(self.device)
            self.pool.give(probe)
            probe = self.pool.take(self.pool.block_bytes)  # clean: near miss, rebinding after the previous block was given back
        if probe is not None:
            self.pool.give(probe)

    def close(self) -> None:
        self.stream.synchronize()
        self.reap()
        if self._scratch is not None:
            self.pool.give(self._scratch)
            self._scratch = None


def bench(pool: PinnedPool, sizes: Sequence[int], device: torch.device) -> dict[int, float]:
    times: dict[int, float] = {}
    for size in sizes:
        block = pool.take(size)  # leak: the last measured block of a bench cut short by break is not given back
        if block is None:
            continue
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        block.storage[:size].to(device, non_blocking=True)
        end.record()
        end.synchronize()
        times[size] = start.elapsed_time(end)
        if times[size] > 1000.0:
            break
        pool.give(block)
    return times
