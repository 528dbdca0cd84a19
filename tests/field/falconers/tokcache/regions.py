"""Pinned windows over big files. What is not pinned may be unmapped at any time."""
import mmap
import os

REGION = 8 << 20


class BudgetExceeded(MemoryError):
    pass


class Region:
    def __init__(self, path, index, data):
        self.path = path
        self.index = index
        self.data = data
        self.pins = 0

    @property
    def key(self):
        return self.path, self.index


class RegionCache:
    def __init__(self, budget):
        self.budget = budget
        self.regions = {}
        self.misses = 0

    def pin(self, path, index):
        region = self.regions.get((path, index))
        if region is None:
            self._shrink()
            self.misses += 1
            with open(path, "rb") as f:  # clean: closed by the with statement, the mapping does not need it
                left = os.fstat(f.fileno()).st_size - index * REGION
                data = mmap.mmap(f.fileno(), min(REGION, left), prot=mmap.PROT_READ, offset=index * REGION)  # clean: near miss, in the table until _shrink or close() closes it
            region = self.regions[path, index] = Region(path, index, data)
        region.pins += 1
        return region

    def unpin(self, region):
        region.pins -= 1

    def _shrink(self):
        while (len(self.regions) + 1) * REGION > self.budget:
            for region in self.regions.values():
                if region.pins == 0:
                    break
            else:
                raise BudgetExceeded("all %d regions are pinned" % len(self.regions))
            region.data.close()
            del self.regions[region.key]

    def close(self):
        for region in self.regions.values():
            region.data.close()
        self.regions.clear()
