"""Size-classed staging regions.

lend() hands out a region of the smallest class that is large enough,
take_back() returns it to its class.
"""
import mmap
import threading


class RegionsSpent(Exception):
    pass


class Region:
    def __init__(self, klass, mem):
        self.klass = klass
        self.mem = mem
        self.length = 0
        self.sealed = False

    def write(self, data):
        if self.sealed:
            raise RuntimeError("region is sealed")
        self.mem[self.length:self.length + len(data)] = data
        self.length += len(data)

    def seal(self):
        self.sealed = True
        return memoryview(self.mem)[:self.length]

    def reset(self):
        self.length = 0
        self.sealed = False


class RegionPool:
    def __init__(self, classes):
        self._lock = threading.Lock()
        self._sizes = sorted(classes)
        self._ready = {
            k: [Region(k, mmap.mmap(-1, k)) for _ in range(classes[k])] for k in self._sizes  # clean: the memory stays mapped until unmap_all()
        }
        self.lent = 0

    def lend(self, nbytes):
        with self._lock:
            for k in self._sizes:
                if k < nbytes or not self._ready[k]:
                    continue
                region = self._ready[k].pop()  # clean: handed to the caller
                self.lent += 1
                return region
        raise RegionsSpent(nbytes)

    def lend_best(self, nbytes, prefer):
        """A region for which prefer(region) is true, else any of the class."""
        with self._lock:
            for k in self._sizes:
                if k < nbytes:
                    continue
                fallback = None
                while self._ready[k]:
                    region = self._ready[k].pop()  # leak: the regions that are not preferred are put into fallback one over the other
                    if prefer(region):
                        if fallback is not None:
                            self._ready[k].append(fallback)
                        self.lent += 1
                        return region
                    fallback = region
                if fallback is not None:
                    self.lent += 1
                    return fallback
        raise RegionsSpent(nbytes)

    def take_back(self, region):
        region.reset()
        with self._lock:
            self.lent -= 1
            self._ready[region.klass].append(region)

    def unmap_all(self):
        with self._lock:
            for k in self._sizes:
                while self._ready[k]:
                    self._ready[k].pop().mem.close()  # clean: unmapped at once
