"""Scratch tensors cached by shape, and a wrapper with a per-layer quota."""
from __future__ import annotations

import torch


class ShapeWorkspace:
    def __init__(self, device: torch.device, cap: int = 256) -> None:
        self.device = device
        self.cap = cap
        self.live = 0
        self._racks: dict[tuple, list[torch.Tensor]] = {}

    def rent(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if self.live >= self.cap:
            return None
        self.live += 1
        rack = self._racks.get((shape, dtype))
        if rack:
            return rack.pop()  # clean: returned to the caller
        return torch.empty(shape, dtype=dtype, device=self.device)

    def hand_in(self, t: torch.Tensor) -> None:
        self.live -= 1
        self._racks.setdefault((tuple(t.shape), t.dtype), []).append(t)


class ScopedWorkspace:
    """Wraps a ShapeWorkspace; one per layer, with a quota."""

    def __init__(self, base: ShapeWorkspace, quota: int) -> None:
        self.base = base
        self.quota = quota
        self.out = 0

    def rent(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        t = self.base.rent(shape, dtype)  # leak: above the quota None is returned and t stays out of the base
        if t is None or self.out >= self.quota:
            return None
        self.out += 1
        return t

    def hand_in(self, t: torch.Tensor) -> None:
        self.out -= 1
        self.base.hand_in(t)

    def rent_zero(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        t = self.rent(shape, dtype)  # clean: the raise is for None only
        if t is None:
            raise MemoryError(f"layer quota {self.quota}")
        return t.zero_()
