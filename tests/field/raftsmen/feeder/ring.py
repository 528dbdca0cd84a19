"""Device batch tensors by bucketed length.

`borrow` and `settle` are the two halves; `RingTicket` binds a tensor to its ring
so that code further down can settle without knowing which ring it came from.
"""
from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Deque, Dict, Optional

import torch


@dataclass
class RingTicket:
    ring: "DeviceRing"
    tokens: torch.Tensor
    rows: int = 0
    epoch: int = 0

    def settle(self) -> None:
        self.ring.settle(self)


class DeviceRing:
    def __init__(self, batch: int, device: torch.device, per_bucket: int = 3) -> None:
        self.batch = batch
        self.device = device
        self.per_bucket = per_bucket
        self._made: Dict[int, int] = defaultdict(int)
        self._rest: Dict[int, Deque[torch.Tensor]] = defaultdict(deque)

    @staticmethod
    def bucket(length: int) -> int:
        b = 128
        while b < length:
            b *= 2
        return b

    def borrow(self, length: int) -> Optional[RingTicket]:
        b = self.bucket(length)
        rest = self._rest[b]
        if rest:
            return RingTicket(self, rest.popleft())  # clean: handed to the caller in a ticket
        if self._made[b] >= self.per_bucket:
            return None
        self._made[b] += 1
        return RingTicket(self, torch.empty(self.batch, b, dtype=torch.int32, device=self.device))

    def settle(self, ticket: RingTicket) -> None:
        self._rest[ticket.tokens.shape[1]].append(ticket.tokens)

    def purge(self, length: int) -> int:
        """Drops the resting tensors of a bucket that is not used any more."""
        b = self.bucket(length)
        n = 0
        while self._rest[b]:
            self._rest[b].pop()  # clean: dropped for good and taken off _made
            self._made[b] -= 1
            n += 1
        return n
