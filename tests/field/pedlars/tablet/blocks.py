"""Device blocks from a free map, and a striped writer that takes them in groups."""
from typing import Dict, List, Optional


class FreeMap:
    def __init__(self, blocks: int) -> None:
        self._bits = [True] * blocks
        self.free_count = blocks

    def allocate(self) -> Optional[int]:
        for i, free in enumerate(self._bits):
            if free:
                self._bits[i] = False
                self.free_count -= 1
                return i
        return None

    def deallocate(self, block: int) -> None:
        self._bits[block] = True
        self.free_count += 1


class Reserve:
    """A few blocks set aside, so that a checkpoint never fails for want of space."""

    def __init__(self, freemap: FreeMap, size: int) -> None:
        self.freemap = freemap
        self.size = size
        self._blocks: List[int] = []

    def top_up(self) -> int:
        while len(self._blocks) < self.size:
            block = self.freemap.allocate()  # leak: shrink() cuts blocks off the list for good
            if block is None:
                break
            self._blocks.append(block)
        return len(self._blocks)

    def draw(self) -> Optional[int]:
        return self._blocks.pop() if self._blocks else None

    def refill(self, block: int) -> None:
        if len(self._blocks) < self.size:
            self._blocks.append(block)
        else:
            self.freemap.deallocate(block)

    def shrink(self, size: int) -> None:
        self.size = size
        self._blocks = self._blocks[:size]


class Extent:
    """A run of blocks that grows; free() returns all of them."""

    def __init__(self, freemap: FreeMap) -> None:
        self.freemap = freemap
        self.blocks: List[int] = []
        self.payload: Dict[int, bytes] = {}

    def extend(self, data: bytes) -> bool:
        block = self.freemap.allocate()  # clean: near miss, in blocks until free() or cut()
        if block is None:
            return False
        self.blocks.append(block)
        self.payload[block] = data
        return True

    def cut(self, keep: int) -> int:
        cut = 0
        while len(self.blocks) > keep:
            block = self.blocks.pop()
            del self.payload[block]
            self.freemap.deallocate(block)
            cut += 1
        return cut

    def free(self) -> None:
        self.cut(0)

    def rewrite(self, index: int, data: bytes) -> bool:
        """Copy on write of one block."""
        block = self.freemap.allocate()  # clean: near miss, swapped in, and the old one is freed
        if block is None:
            return False
        old, self.blocks[index] = self.blocks[index], block
        self.payload[block] = data
        del self.payload[old]
        self.freemap.deallocate(old)
        return True

    def spare_check(self) -> bool:
        return self.freemap.allocate() is not None  # leak: the block taken for the test is dropped
