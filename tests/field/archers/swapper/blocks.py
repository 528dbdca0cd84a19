from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class HostBlock:
    tier: str
    index: int


class BlockPool:
    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]  # clean: returned to the caller

    def free(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)


class TieredHostPool:
    """Pinned blocks as long as there are any, pageable ones for the rest."""

    def __init__(self, pinned: BlockPool, pageable: BlockPool) -> None:
        self.pinned = pinned
        self.pageable = pageable

    def alloc(self, n: int) -> list[HostBlock] | None:
        first = self.pinned.alloc(min(n, self.pinned.available))  # leak: when the pageable tier is short the pinned part is dropped
        rest = self.pageable.alloc(n - len(first))  # clean: returned to the caller, None holds nothing
        if rest is None:
            return None
        return [HostBlock("pinned", i) for i in first] + [HostBlock("pageable", i) for i in rest]

    def free(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            tier = self.pinned if block.tier == "pinned" else self.pageable
            tier.free([block.index])

    @contextmanager
    def scratch(self, n: int) -> Iterator[list[HostBlock]]:
        blocks = self.alloc(n)  # clean: freed by the finally, None raises with nothing held
        if blocks is None:
            raise MemoryError(f"{n} host blocks")
        try:
            yield blocks
        finally:
            self.free(blocks)
