"""Reference-counted KV blocks with a hash index for reuse."""
from __future__ import annotations

from collections import OrderedDict


class BlockManager:
    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._refs: dict[int, int] = {}
        self._by_hash: dict[int, int] = {}

    def allocate(self) -> int | None:
        if not self._free:
            return None
        bid, _ = self._free.popitem(last=False)  # clean: counted once and returned
        self._refs[bid] = 1
        return bid

    def share(self, block_hash: int) -> int | None:
        """A further reference to a block with known content."""
        bid = self._by_hash.get(block_hash)
        if bid is None or bid not in self._refs:
            return None
        self._refs[bid] += 1  # clean: returned to the sharer, deallocate lowers it
        return bid

    def publish(self, bid: int, block_hash: int) -> None:
        self._by_hash[block_hash] = bid

    def deallocate(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            del self._refs[bid]
            self._free[bid] = None
