"""Activation buffers and communication tickets of one pipeline stage."""
from __future__ import annotations

from typing import List, Optional


class Activation:
    __slots__ = ("index", "payload")

    def __init__(self, index: int) -> None:
        self.index = index
        self.payload: List[float] = []


class ActivationPool:
    def __init__(self, count: int) -> None:
        self._shelf = [Activation(i) for i in range(count)]

    def take(self) -> Optional[Activation]:
        return self._shelf.pop() if self._shelf else None

    def restore(self, act: Activation) -> None:
        act.payload = []
        self._shelf.append(act)

    def __len__(self) -> int:
        return len(self._shelf)


class TicketOffice:
    """Tags for point-to-point messages; a tag may not be reused before it is retired."""

    def __init__(self, tags: int) -> None:
        self._tags = list(range(tags))

    def issue(self) -> int:
        if not self._tags:
            raise LookupError("no free tag")
        return self._tags.pop()

    def retire(self, tag: int) -> None:
        self._tags.append(tag)

    def __len__(self) -> int:
        return len(self._tags)
