"""Three fixed resources: draft KV slots, tree nodes, and mask buffers for verification."""
from __future__ import annotations

from collections import deque

import torch


class NoDraft(RuntimeError):
    """All draft slots are taken."""


class DraftLease:
    __slots__ = ("pool", "slot", "length")

    def __init__(self, pool: DraftPool, slot: int):
        self.pool, self.slot, self.length = pool, slot, 0

    def commit(self, n: int) -> None:
        self.length += n

    def rewind(self, to: int) -> None:
        self.length = min(self.length, to)

    def close(self) -> None:
        if self.slot is not None:
            self.pool._free.append(self.slot)
            self.slot = None


class DraftPool:
    def __init__(self, n: int):
        self._free = deque(range(n))

    def open(self) -> DraftLease:
        if not self._free:
            raise NoDraft("all slots are in use")
        return DraftLease(self, self._free.popleft())  # clean: close() of the lease appends it again


class NodePool:
    """Token and parent of every node in two flat arrays, as the kernel wants them."""

    def __init__(self, n: int):
        self.tok, self.parent = [0] * n, [-1] * n
        self._free = list(range(n))

    def get(self, tok: int, parent: int) -> int:
        if not self._free:
            return -1
        i = self._free.pop()  # clean: returned
        self.tok[i], self.parent[i] = tok, parent
        return i

    def put(self, i: int) -> None:
        self.parent[i] = -1
        self._free.append(i)


class MaskRing:
    def __init__(self, n: int, width: int, device: str = "cuda"):
        self.mask = torch.zeros(n, width, width, dtype=torch.bool, device=device)
        self.width = width
        self._free = list(range(n))

    def take(self) -> int | None:
        return self._free.pop() if self._free else None  # clean: returned

    def take_clean(self, dirty: set[int]) -> int | None:
        while self._free:
            m = self._free.pop()  # leak: the dirty ones that are passed over are not put back
            if m not in dirty:
                return m
        return None

    def give(self, m: int) -> None:
        self._free.append(m)
