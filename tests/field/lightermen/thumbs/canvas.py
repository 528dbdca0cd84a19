"""Canvases: zeroed pixel buffers that are recycled between thumbnails."""
from __future__ import annotations

import threading
from typing import Dict, List, Optional, Tuple

Size = Tuple[int, int]


class Canvas:
    def __init__(self, size: Size) -> None:
        self.size = size
        self.pixels = bytearray(size[0] * size[1] * 4)
        self.owner: Optional["CanvasDepot"] = None

    def clear(self) -> None:
        self.pixels[:] = bytes(len(self.pixels))

    def recycle(self) -> None:
        if self.owner is not None:
            self.owner.accept(self)


class CanvasDepot:
    """lend() gives a canvas; it comes back by canvas.recycle() or depot.accept(canvas)."""

    def __init__(self, per_size: int) -> None:
        self.per_size = per_size
        self._guard = threading.Lock()
        self._stock: Dict[Size, List[Canvas]] = {}
        self._lent = 0

    def lend(self, size: Size) -> Canvas:
        with self._guard:
            stock = self._stock.get(size)
            canvas = stock.pop() if stock else Canvas(size)
            canvas.owner = self
            self._lent += 1
            return canvas

    def accept(self, canvas: Canvas) -> None:
        canvas.owner = None
        canvas.clear()
        with self._guard:
            self._lent -= 1
            shelf = self._stock.setdefault(canvas.size, [])
            if len(shelf) < self.per_size:
                shelf.append(canvas)
