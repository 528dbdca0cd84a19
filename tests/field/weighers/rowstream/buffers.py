"""Fixed-size row buffers shared by the readers of one worker."""
import numpy as np


class RowBuffers:
    def __init__(self, rows, width, limit):
        self.rows = rows
        self.width = width
        self._stock = [np.empty((rows, width), dtype=np.int32) for _ in range(limit)]

    def draw(self):
        if not self._stock:
            raise MemoryError("all row buffers are out")
        return self._stock.pop()

    def stow(self, buf):
        self._stock.append(buf)
