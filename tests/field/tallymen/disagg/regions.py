"""KV blocks and the memory registrations that a NIC needs to read them."""
from collections import deque
from dataclasses import dataclass


class Overlap(Exception):
    pass


class NoKeys(Exception):
    pass


@dataclass(frozen=True)
class Mr:
    key: int
    blocks: tuple

    def touches(self, blocks):
        return not set(self.blocks).isdisjoint(blocks)


class KvBlocks:
    """grab() is all or nothing, None when there are too few."""

    def __init__(self, count):
        self.count = count
        self._free = deque(range(count))

    def grab(self, n):
        if n > len(self._free):
            return None
        return [self._free.popleft() for _ in range(n)]  # clean: the length was checked before

    def yield_back(self, blocks):
        self._free.extend(blocks)

    @property
    def load(self):
        return 1.0 - len(self._free) / self.count


class RegionTable:
    def __init__(self, nic, keys=1024):
        self.nic = nic
        self._keys = deque(range(1, keys + 1))
        self._live = {}

    def register(self, blocks):
        if not self._keys:
            raise NoKeys()
        key = self._keys.popleft()  # leak: Overlap is raised with the key popped
        for mr in self._live.values():
            if mr.touches(blocks):
                raise Overlap(f"key {mr.key}")
        mr = Mr(key, tuple(blocks))
        self.nic.map(mr.key, mr.blocks)
        self._live[key] = mr
        return mr

    def deregister(self, mr):
        self.nic.unmap(mr.key)
        del self._live[mr.key]
        self._keys.append(mr.key)
