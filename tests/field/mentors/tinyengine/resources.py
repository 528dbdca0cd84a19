from __future__ import annotations


class PagePool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def free(self, pages: list[int]) -> None:
        self._free.extend(pages)


class EncoderCache:
    """Encoder outputs; an entry stays while it has references."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.refs: dict[str, int] = {}

    def incref(self, key: str) -> bool:
        if key not in self.refs and len(self.refs) >= self.budget:
            return False
        self.refs[key] = self.refs.get(key, 0) + 1
        return True

    def decref(self, key: str) -> None:
        self.refs[key] -= 1
        if self.refs[key] == 0:
            del self.refs[key]


class GrammarSlots:
    def __init__(self, n: int) -> None:
        self._free = set(range(n))

    def attach(self) -> int | None:
        return self._free.pop() if self._free else None

    def detach(self, slot: int) -> None:
        self._free.add(slot)
