"""Pinned swap buffers, ordered by size."""
import heapq

import torch


class SwapBuffer:
    def __init__(self, numel):
        self.data = torch.empty(numel, dtype=torch.float32, pin_memory=True)
        self.numel = numel
        self.key = None

    def __lt__(self, other):
        return self.numel < other.numel


class SwapBuffers:
    """The smallest buffer comes first."""

    def __init__(self, sizes):
        self._heap = [SwapBuffer(n) for n in sizes]
        heapq.heapify(self._heap)

    def fetch(self):
        return heapq.heappop(self._heap) if self._heap else None  # clean: returned to the caller

    def stow(self, buf):
        buf.key = None
        heapq.heappush(self._heap, buf)

    def fetch_fitting(self, numel):
        small = []
        try:
            while True:
                buf = self.fetch()  # clean: near miss, too small ones are stowed in the finally
                if buf is None or buf.numel >= numel:
                    return buf
                small.append(buf)
        finally:
            for b in small:
                self.stow(b)

    def fetch_exact(self, numel):
        buf = self.fetch()  # leak: a buffer of another size is not stowed before None is returned
        if buf is not None and buf.numel == numel:
            buf.data.zero_()
            return buf
        return None
