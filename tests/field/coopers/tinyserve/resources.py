"""What a running request occupies: KV blocks, a sampler row, an image slot, a use of its adapter."""
from __future__ import annotations

from collections import Counter


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        taken, self._free = self._free[cut:], self._free[:cut]
        return taken

    def free(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    @property
    def usage(self) -> int:
        return len(self._free)


class RowTable:
    """Rows of the persistent sampling tensors."""

    def __init__(self, max_num_seqs: int) -> None:
        self._rows = list(range(max_num_seqs))

    def acquire_row(self) -> int | None:
        return self._rows.pop(0) if self._rows else None

    def release_row(self, row: int) -> None:
        self._rows.append(row)


class ImageSlots:
    def __init__(self, n: int) -> None:
        self._open = set(range(n))

    def occupy(self) -> int | None:
        return self._open.pop() if self._open else None

    def vacate(self, slot: int) -> None:
        self._open.add(slot)


class AdapterUse:
    def __init__(self, max_active: int) -> None:
        self.max_active = max_active
        self.uses: Counter[str] = Counter()

    def enter(self, name: str) -> bool:
        if name not in self.uses and len(self.uses) >= self.max_active:
            return False
        self.uses[name] += 1
        return True

    def leave(self, name: str) -> None:
        self.uses[name] -= 1
        if self.uses[name] == 0:
            del self.uses[name]
