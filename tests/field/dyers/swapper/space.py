from __future__ import annotations

from typing import Dict, List, Set


class OutOfBlocks(Exception):
    pass


class BlockSpace:
    """Blocks on one device. Subclasses differ in how the free set is ordered."""

    def __init__(self, n: int) -> None:
        self.total = n
        self.refs: Dict[int, int] = {}

    def _next(self) -> int:
        raise NotImplementedError

    def _recycle(self, block: int) -> None:
        raise NotImplementedError

    def obtain(self) -> int:
        block = self._next()
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> int:
        self.refs[block] += 1
        return block

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            del self.refs[block]
            self._recycle(block)


class LifoSpace(BlockSpace):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._stack = list(range(n))

    def _next(self) -> int:
        if not self._stack:
            raise OutOfBlocks(self.total)
        return self._stack.pop()

    def _recycle(self, block: int) -> None:
        self._stack.append(block)


class SetSpace(BlockSpace):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._set: Set[int] = set(range(n))

    def _next(self) -> int:
        if not self._set:
            raise OutOfBlocks(self.total)
        block = min(self._set)
        self._set.remove(block)
        return block

    def _recycle(self, block: int) -> None:
        self._set.add(block)


def obtain_many(space: BlockSpace, n: int) -> List[int]:
    got: List[int] = []
    try:
        while len(got) < n:
            got.append(space.obtain())  # clean: released and re-raised on shortage, else returned
    except OutOfBlocks:
        for b in got:
            space.release(b)
        raise
    return got
