"""Pinned host memory for checkpoint staging, handed out in whole blocks."""
import threading

import torch


class PinnedArena:
    def __init__(self, block_bytes, count):
        self.block_bytes = block_bytes
        self._blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._guard = threading.Condition()

    def checkout(self):
        with self._guard:
            while not self._blocks:
                self._guard.wait()
            return self._blocks.pop()

    def try_checkout(self):
        with self._guard:
            return self._blocks.pop() if self._blocks else None

    def checkin(self, block):
        with self._guard:
            self._blocks.append(block)
            self._guard.notify()
