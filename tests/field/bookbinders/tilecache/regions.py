"""Pinned memory in equal regions."""
from contextlib import contextmanager

import torch


class NoRegion(Exception):
    pass


class Region:
    def __init__(self, index, mem):
        self.index = index
        self.mem = mem

    def view(self, nbytes):
        return memoryview(self.mem.numpy())[:nbytes]


class RegionPool:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._mem = torch.empty((count, nbytes), dtype=torch.uint8, pin_memory=True)
        self._free = list(range(count))
        self.low_water = count

    def take(self):
        if not self._free:
            raise NoRegion(f"all {len(self._mem)} regions are out")
        index = self._free.pop()  # clean: leaves in the Region
        self.low_water = min(self.low_water, len(self._free))
        return Region(index, self._mem[index])

    def drop(self, region):
        region.mem = None
        self._free.append(region.index)

    @contextmanager
    def temp(self):
        region = self.take()  # clean: dropped when the block ends
        try:
            yield region
        finally:
            self.drop(region)
