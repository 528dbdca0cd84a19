from __future__ import annotations

from .request import Request


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.block_size = block_size
        self._free_ids = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free_ids)

    def get_new_blocks(self, n: int) -> list[int] | None:
        if n > len(self._free_ids):
            return None
        taken, self._free_ids = self._free_ids[:n], self._free_ids[n:]
        return taken

    def free_blocks(self, ids: list[int]) -> None:
        self._free_ids.extend(ids)

    def blocks_needed(self, request: Request, extra: int = 0) -> int:
        total = (request.num_tokens + extra + self.block_size - 1) // self.block_size
        return max(0, total - len(request.blocks))

    def allocate_slots(self, request: Request, extra: int = 1) -> bool:
        ids = self.get_new_blocks(self.blocks_needed(request, extra))  # clean: moved into the request
        if ids is None:
            return False
        request.blocks.extend(ids)
        return True

    def free(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        self.free_blocks(blocks)


class SlotPool:
    """Rows of the batched sampling and grammar state."""

    def __init__(self, rows: int) -> None:
        self._rows = set(range(rows))

    def assign(self) -> int:
        return self._rows.pop() if self._rows else -1

    def unassign(self, row: int) -> None:
        self._rows.add(row)

    @property
    def vacant(self) -> int:
        return len(self._rows)
