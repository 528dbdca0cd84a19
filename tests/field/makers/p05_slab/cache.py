from __future__ import annotations

from collections import OrderedDict
from typing import Optional

import torch

from .slab import SlabAllocator, SlabHandle


class ActivationCache:
    """LRU of activations copied into slab cells."""

    def __init__(self, allocator: SlabAllocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self._entries: "OrderedDict[str, SlabHandle]" = OrderedDict()
        self._shapes: dict[str, tuple] = {}

    def store(self, name: str, value: torch.Tensor) -> None:
        old = self._entries.pop(name, None)  # clean: released when there was one
        if old is not None:
            self.allocator.release(old)
        h = self.allocator.alloc(value.numel())  # clean: near miss, entry of the same name was released first
        self.allocator.tensor(h, *value.shape).copy_(value)
        self._entries[name] = h
        self._shapes[name] = tuple(value.shape)
        while len(self._entries) > self.capacity:
            victim, handle = self._entries.popitem(last=False)  # clean: the evicted handle is released
            self._shapes.pop(victim, None)
            self.allocator.release(handle)

    def load(self, name: str) -> Optional[torch.Tensor]:
        h = self._entries.get(name)
        if h is None:
            return None
        self._entries.move_to_end(name)
        return self.allocator.tensor(h, *self._shapes[name])

    def rename(self, old: str, new: str) -> bool:
        h = self._entries.pop(old, None)  # leak: when new already exists the popped handle goes nowhere
        if h is None:
            return False
        if new in self._entries:
            return False
        self._entries[new] = h
        self._shapes[new] = self._shapes.pop(old)
        return True

    def clear(self) -> None:
        for h in self._entries.values():
            self.allocator.release(h)
        self._entries.clear()
        self._shapes.clear()
