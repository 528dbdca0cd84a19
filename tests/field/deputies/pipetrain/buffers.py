"""Activation buffers and channel tags for pipeline stages."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch


class ActivationPool:
    def __init__(self, n: int, shape: tuple[int, ...], device: torch.device) -> None:
        self._free = [torch.empty(shape, device=device) for _ in range(n)]

    def checkout(self) -> torch.Tensor | None:
        return self._free.pop() if self._free else None

    def checkin(self, t: torch.Tensor) -> None:
        self._free.append(t)

    @contextmanager
    def temporary(self, enabled: bool = True) -> Iterator[torch.Tensor | None]:
        buf = self.checkout() if enabled else None  # clean: near miss, when not enabled there is nothing, otherwise the finally checks it in
        try:
            yield buf
        finally:
            if buf is not None:
                self.checkin(buf)


class TagSpace:
    """Message tags must not be reused while a message is under way."""

    def __init__(self, n: int) -> None:
        self._tags = set(range(n))

    def reserve(self) -> int | None:
        return self._tags.pop() if self._tags else None

    def reserve_range(self, n: int) -> list[int] | None:
        got: list[int] = []
        for _ in range(n):
            if not self._tags:
                return None
            got.append(self._tags.pop())  # leak: when the set runs out in the middle, the tags collected so far are forgotten
        return got

    def unreserve(self, tag: int) -> None:
        self._tags.add(tag)
