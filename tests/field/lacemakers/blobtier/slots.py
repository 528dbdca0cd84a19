"""Disk slots: a counter of what the volume may hold, and the files that fill it."""
from __future__ import annotations

import os

import torch


class SlotCounter:
    def __init__(self, root: str, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.used = 0

    def occupy(self) -> bool:
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def vacate(self) -> None:
        self.used -= 1

    def path(self, name: str) -> str:
        return os.path.join(self.root, name + ".pt")


class DiskTier:
    def __init__(self, slots: SlotCounter) -> None:
        self.slots = slots
        self.names: set[str] = set()

    def spill(self, name: str, data: torch.Tensor) -> bool:
        if name in self.names:
            return True
        if not self.slots.occupy():  # clean: near miss, the name in names stands for it until forget()
            return False
        torch.save(data.clone(), self.slots.path(name))
        self.names.add(name)
        return True

    def overwrite(self, name: str, data: torch.Tensor) -> bool:
        if not self.slots.occupy():  # leak: a name already on disk occupies a second slot for its one forget()
            return False
        torch.save(data.clone(), self.slots.path(name))
        self.names.add(name)
        return True

    def forget(self, name: str) -> None:
        if name in self.names:
            self.names.discard(name)
            os.unlink(self.slots.path(name))
            self.slots.vacate()
