from __future__ import annotations

import threading
from collections import deque


class OutOfBlocks(RuntimeError):
    pass


class BlockStore:
    """KV blocks with reference counts, shared by engine and transfer threads."""

    def __init__(self, n: int):
        self.refs = [0] * n
        self._spare = deque(range(n))
        self._mu = threading.Lock()

    def draw(self, n: int) -> list[int]:
        with self._mu:
            if len(self._spare) < n:
                raise OutOfBlocks(f"want {n}, have {len(self._spare)}")
            out = [self._spare.popleft() for _ in range(n)]  # clean: returned with one reference each
            for b in out:
                self.refs[b] = 1
            return out

    def hold(self, blocks: list[int]) -> list[int]:
        """One more reference on each block; pair with drop()."""
        with self._mu:
            for b in blocks:
                self.refs[b] += 1
        return blocks

    def drop(self, blocks: list[int]) -> None:
        with self._mu:
            for b in blocks:
                self.refs[b] -= 1
                if self.refs[b] == 0:
                    self._spare.append(b)


class StagingRing:
    """Pinned host chunks; claim() gives an index or None."""

    def __init__(self, chunks: list[memoryview]):
        self.chunks = chunks
        self._idle = set(range(len(chunks)))

    def claim(self) -> int | None:
        return self._idle.pop() if self._idle else None  # clean: returned to the caller

    def claim_for(self, nbytes: int) -> int | None:
        idx = self.claim()  # leak: a chunk that is too small is not surrendered
        if idx is None or len(self.chunks[idx]) < nbytes:
            return None
        return idx

    def surrender(self, idx: int) -> None:
        self._idle.add(idx)


class BootstrapRooms:
    """Room numbers agreed between both sides of one request."""

    def __init__(self, lo: int, hi: int):
        self.lo, self.hi = lo, hi
        self.taken: dict[int, str] = {}

    def enter(self, rid: str) -> int:
        for room in range(self.lo, self.hi):
            if room not in self.taken:
                self.taken[room] = rid
                return room
        return -1

    def exit(self, room: int) -> None:
        self.taken.pop(room, None)
