from __future__ import annotations

import threading

import torch
from torch import Tensor


class CanvasPool:
    """Tensors cached by shape."""

    def __init__(self, device: str, keep: int = 4) -> None:
        self.device = device
        self.keep = keep
        self._by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        self._lock = threading.Lock()

    def stretch(self, *shape: int) -> Tensor:
        with self._lock:
            kept = self._by_shape.get(shape)
            if kept:
                return kept.pop()  # clean: handed to the caller
        return torch.empty(shape, device=self.device)

    def stretch_square(self, side: int) -> Tensor:
        return self.stretch(3, side, side)  # clean: handed to the caller

    def fold(self, canvas: Tensor) -> None:
        with self._lock:
            kept = self._by_shape.setdefault(tuple(canvas.shape), [])
            if len(kept) < self.keep:
                kept.append(canvas)


class CountedCanvases:
    """Bounds how many canvases are out at once."""

    def __init__(self, pool: CanvasPool, limit: int) -> None:
        self.pool = pool
        self._gate = threading.Semaphore(limit)

    def stretch(self, *shape: int) -> Tensor:
        self._gate.acquire()  # clean: released by fold() of the canvas returned here
        return self.pool.stretch(*shape)  # clean: handed to the caller

    def stretch_within(self, timeout: float, side: int, max_side: int) -> Tensor | None:
        if not self._gate.acquire(timeout=timeout):  # leak: too large a side returns None with the gate entered
            return None
        if side > max_side:
            return None
        return self.pool.stretch_square(side)  # clean: handed to the caller

    def fold(self, canvas: Tensor) -> None:
        self.pool.fold(canvas)
        self._gate.release()
