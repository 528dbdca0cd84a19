"""Registered memory: what a peer may read or write has a key."""
import itertools
import threading
from dataclasses import dataclass


class OutOfRegions(RuntimeError):
    pass


@dataclass
class Region:
    key: int
    start: int
    blocks: int
    refs: int = 1


class MemoryTable:
    def __init__(self, nic, total_blocks, max_keys=1024):
        self.nic = nic
        self.max_keys = max_keys
        self.regions = {}
        self._free = set(range(total_blocks))
        self._keys = itertools.count(1)
        self._lock = threading.Lock()

    def _find_run(self, n):
        run = []
        for b in sorted(self._free):
            run = run + [b] if run and b == run[-1] + 1 else [b]
            if len(run) == n:
                return run
        return None

    def register(self, blocks):
        """A region of consecutive blocks that peers can address by its key."""
        with self._lock:
            run = self._find_run(blocks)
            if run is None:
                raise OutOfRegions(f"no run of {blocks} blocks")
            self._free.difference_update(run)  # clean: near miss, put back when there is no key, else part of the region
            if len(self.regions) >= self.max_keys:
                self._free.update(run)
                raise OutOfRegions(f"all {self.max_keys} keys in use")
            region = Region(next(self._keys), run[0], blocks)
            self.regions[region.key] = region
        self.nic.bind(region.key, region.start, region.blocks)
        return region

    def ref(self, key):
        """Another user of a region, None if it has gone already."""
        with self._lock:
            region = self.regions.get(key)
            if region is not None:
                region.refs += 1
            return region

    def unregister(self, region):
        with self._lock:
            region.refs -= 1
            if region.refs:
                return
            del self.regions[region.key]
            self._free.update(range(region.start, region.start + region.blocks))
        self.nic.unbind(region.key)
