"""Pinned host buffers for swapping KV blocks out to CPU memory."""
from dataclasses import dataclass
from typing import Dict, List, Optional

import torch


class PinnedArena:
    def __init__(self, count: int, numel: int):
        self._idle: List[torch.Tensor] = [torch.empty(numel) for _ in range(count)]

    def checkout(self) -> Optional[torch.Tensor]:
        if self._idle:
            return self._idle.pop()
        return None

    def checkin(self, buffer: torch.Tensor) -> None:
        self._idle.append(buffer)


@dataclass
class SwapRecord:
    request: str
    buffer: torch.Tensor
    length: int


class Swapper:
    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.records: Dict[str, SwapRecord] = {}

    def swap_out(self, request: str, device_block: torch.Tensor) -> bool:
        if request in self.records:
            return True
        host = self.arena.checkout()  # clean: near miss, owned by the record until swap_in or drop
        if host is None:
            return False
        n = device_block.numel()
        host[:n].copy_(device_block.view(-1))
        self.records[request] = SwapRecord(request, host, n)
        return True

    def swap_in(self, request: str, target: torch.Tensor) -> None:
        record = self.records.pop(request)
        target.view(-1).copy_(record.buffer[: record.length])
        self.arena.checkin(record.buffer)

    def drop(self, request: str) -> None:
        record = self.records.pop(request, None)
        if record is not None:
            self.arena.checkin(record.buffer)

    def checksum(self, block: torch.Tensor) -> Optional[float]:
        host = self.arena.checkout()  # leak: nothing gives it back when the block is too large
        if host is None:
            return None
        if block.numel() > host.numel():
            return None
        host[: block.numel()].copy_(block.view(-1))
        value = float(host[: block.numel()].sum())
        self.arena.checkin(host)
        return value

    def mirror(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        left = self.arena.checkout()  # leak: second checkout fails, first one stays out
        if left is None:
            return False
        right = self.arena.checkout()  # clean: near miss, none on the early exit, else checked in
        if right is None:
            return False
        left[: first.numel()].copy_(first.view(-1))
        right[: second.numel()].copy_(second.view(-1))
        same = bool(torch.equal(left[: first.numel()], right[: second.numel()]))
        self.arena.checkin(left)
        self.arena.checkin(right)
        return same
