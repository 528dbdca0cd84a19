"""Cache of rendered surfaces; users pin what they look at, memory is counted in a byte budget."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Optional


class ByteBudget:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def charge(self, count: int) -> bool:
        if self.used + count > self.total:
            return False
        self.used += count
        return True

    def credit(self, count: int) -> None:
        self.used -= count


@dataclass
class Surface:
    key: str
    pixels: list[int]
    size: int
    pins: int = 0
    stamp: float = field(default_factory=time.monotonic)


class SurfaceCache:
    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._surfaces: dict[str, Surface] = {}

    def store(self, key: str, pixels: list[int]) -> bool:
        size = 4 * len(pixels)
        old = self._surfaces.get(key)
        if old is not None and old.pins:
            return False
        if not self.budget.charge(size):  # clean: near miss, credited by invalidate(), also for the replaced one
            return False
        if old is not None:
            self.invalidate(key)
        self._surfaces[key] = Surface(key, pixels, size)
        return True

    def invalidate(self, key: str) -> bool:
        surface = self._surfaces.get(key)
        if surface is None or surface.pins:
            return False
        del self._surfaces[key]
        self.budget.credit(surface.size)
        return True

    def look(self, key: str) -> Optional[Surface]:
        """Pins; done() ends it."""
        surface = self._surfaces.get(key)
        if surface is None:
            return None
        surface.pins += 1
        surface.stamp = time.monotonic()
        return surface

    def done(self, surface: Surface) -> None:
        surface.pins -= 1


class OverlayStore:
    """Badges and watermarks by name; they count against the same budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self._overlays: dict[str, list[int]] = {}

    def install(self, name: str, pixels: list[int]) -> bool:
        if name in self._overlays:
            return False
        if not self.budget.charge(4 * len(pixels)):  # leak: uninstall() and wipe() never credit the bytes
            return False
        self._overlays[name] = pixels
        return True

    def apply(self, name: str, pixels: list[int]) -> list[int]:
        overlay = self._overlays.get(name, [])
        return [max(a, b) for a, b in zip(pixels, overlay)] + pixels[len(overlay) :]

    def uninstall(self, name: str) -> bool:
        return self._overlays.pop(name, None) is not None

    def wipe(self) -> None:
        self._overlays.clear()
