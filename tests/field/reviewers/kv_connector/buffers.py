"""Registered send buffers."""
from __future__ import annotations

import torch


class BufferLease:
    def __init__(self, bank: "BufferBank", index: int, data: torch.Tensor):
        self.bank = bank
        self.index = index
        self.data = data

    def return_(self) -> None:
        self.bank.return_index(self.index)


class BufferBank:
    def __init__(self, count: int, numel: int):
        self._mem = torch.zeros(count, numel)
        self._indices = list(range(count))

    @property
    def numel(self) -> int:
        return self._mem.shape[1]

    def lease(self) -> BufferLease | None:
        if not self._indices:
            return None
        i = self._indices.pop()  # clean: wrapped in the lease which the caller gets
        return BufferLease(self, i, self._mem[i])

    def lease_for(self, numel: int) -> BufferLease | None:
        """A lease if `numel` fits, else None."""
        got = self.lease()  # clean: near miss, returned to the bank when the size does not fit
        if got is None:
            return None
        if numel > self.numel:
            got.return_()
            return None
        return got

    def lease_group(self, n: int) -> list[BufferLease]:
        """Exactly `n` leases or an empty list."""
        group: list[BufferLease] = []
        while len(group) < n:
            one = self.lease()  # leak: a short group is replaced by an empty list without returning its leases
            if one is None:
                return []
            group.append(one)
        return group

    def return_index(self, index: int) -> None:
        self._indices.append(index)
