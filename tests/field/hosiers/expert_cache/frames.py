"""GPU frames for experts and the handles through which the layers use them."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Optional

import torch


class FrameSource(ABC):
    @abstractmethod
    def obtain(self) -> Optional["Frame"]: ...

    @abstractmethod
    def relinquish(self, frame: "Frame") -> None: ...


class Frame:
    def __init__(self, source: FrameSource, index: int, weight: torch.Tensor) -> None:
        self.source = source
        self.index = index
        self.weight = weight
        self.expert: Optional[tuple[int, int]] = None

    def relinquish(self) -> None:
        self.expert = None
        self.source.relinquish(self)


class FramePool(FrameSource):
    def __init__(self, n: int, shape: tuple[int, int], device: str) -> None:
        self._stack = [Frame(self, i, torch.empty(shape, device=device)) for i in range(n)]

    def obtain(self) -> Optional[Frame]:
        return self._stack.pop() if self._stack else None

    def relinquish(self, frame: Frame) -> None:
        self._stack.append(frame)


class SparePool(FrameSource):
    """Keeps one spare frame warm in front of another pool."""

    def __init__(self, inner: FramePool) -> None:
        self.inner = inner
        self._spare: Optional[Frame] = None

    def obtain(self) -> Optional[Frame]:
        if self._spare is not None:
            out, self._spare = self._spare, None
            return out
        return self.inner.obtain()  # clean: handed to the caller

    def relinquish(self, frame: Frame) -> None:
        if self._spare is None:
            self._spare = frame
        else:
            self.inner.relinquish(frame)

    def refill(self) -> None:
        if self._spare is None:
            self._spare = self.inner.obtain()  # clean: near miss, becomes the spare only if there is none

    def shrink(self) -> None:
        if self._spare is not None:
            self.inner.relinquish(self._spare)
            self._spare = None


class DraftReserve:
    """One frame put aside for the draft model, so that the target model cannot starve it."""

    def __init__(self, inner: FrameSource) -> None:
        self.inner = inner
        self.frame: Optional[Frame] = None
        self.generation = 0

    def arm(self) -> bool:
        self.frame = self.inner.obtain()  # leak: on_weights_reloaded arms again over the held frame
        return self.frame is not None

    def on_weights_reloaded(self) -> None:
        """The old contents are stale after a reload."""
        self.generation += 1
        if not self.arm():
            self.generation -= 1

    def disarm(self) -> None:
        if self.frame is not None:
            self.inner.relinquish(self.frame)
            self.frame = None
