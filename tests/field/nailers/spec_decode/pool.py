"""Scratch tensors, keyed by shape, and the row table of the draft model's KV cache."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Optional

import torch


class ScratchPool:
    """Keeps tensors of one dtype and hands them out by shape."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._idle: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self.outstanding = 0

    def lease(self, *shape: int) -> torch.Tensor:
        stack = self._idle.get(shape)
        self.outstanding += 1
        if stack:
            return stack.pop()
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def restore(self, tensor: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault(tuple(tensor.shape), []).append(tensor)

    @contextmanager
    def leased(self, *shape: int) -> Iterator[torch.Tensor]:
        tensor = self.lease(*shape)  # clean: restored in finally
        try:
            yield tensor
        finally:
            self.restore(tensor)

    def prewarm(self, shapes: list[tuple[int, ...]]) -> None:
        """Allocate every shape ahead of the first step."""
        held = [self.lease(*shape) for shape in shapes]  # clean: restored in the loop below
        for tensor in held:
            tensor.zero_()
        while held:
            self.restore(held.pop())

    def largest(self, shapes: list[tuple[int, ...]]) -> int:
        peak = 0
        for shape in shapes:
            tensor = self.lease(*shape)  # leak: only measured, never restored
            peak = max(peak, tensor.numel() * tensor.element_size())
        return peak


class DraftRows:
    """Rows of the draft KV cache, one per running sequence."""

    def __init__(self, rows: int) -> None:
        self._vacant = set(range(rows))

    def claim(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def vacate(self, row: int) -> None:
        self._vacant.add(row)
