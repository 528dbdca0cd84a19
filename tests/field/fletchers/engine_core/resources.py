"""Block pool, encoder cache and grammar matchers."""
from __future__ import annotations

from typing import Dict, List, Optional


class BlockPool:

    def __init__(self, n: int) -> None:
        self._free = list(range(n))

    def get_new_blocks(self, n: int) -> List[int]:
        if n > len(self._free):
            raise ValueError(f"{n} blocks, {len(self._free)} free")
        out, self._free = self._free[:n], self._free[n:]
        return out

    def num_free(self) -> int:
        return len(self._free)

    def free_blocks(self, blocks: List[int]) -> None:
        self._free.extend(blocks)


class EncoderCache:
    """Entries are counted; an entry without users may be evicted."""

    def __init__(self) -> None:
        self._users: Dict[str, int] = {}

    def incref(self, key: str) -> None:
        self._users[key] = self._users.get(key, 0) + 1

    def decref(self, key: str) -> None:
        self._users[key] -= 1

    def evictable(self) -> List[str]:
        return [k for k, n in self._users.items() if n == 0]


class Matcher:

    def __init__(self) -> None:
        self.state = 0

    def reset(self) -> None:
        self.state = 0


class MatcherPool:

    def __init__(self, n: int) -> None:
        self._idle = [Matcher() for _ in range(n)]

    def rent(self) -> Optional[Matcher]:
        return self._idle.pop() if self._idle else None

    def hand_in(self, m: Matcher) -> None:
        m.reset()
        self._idle.append(m)
