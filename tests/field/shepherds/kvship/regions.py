"""Registered memory regions. Registration with the NIC is slow, so regions are made once and handed round."""
import logging
import threading

log = logging.getLogger("kvship.regions")


class OutOfRegions(Exception):
    pass


class Region:
    """A slice of registered memory with a pin count. The last unpin sends it back to its table."""

    def __init__(self, table, index, nbytes):
        self._table = table
        self.index = index
        self.nbytes = nbytes
        self.pins = 0
        self.rkey = 0

    def pin(self):
        with self._table.lock:
            self.pins += 1
        return self

    def unpin(self):
        with self._table.lock:
            self.pins -= 1
            if self.pins == 0:
                self._table._return(self)
            elif self.pins < 0:
                raise AssertionError(f"region {self.index} unpinned too often")


class RegionTable:
    def __init__(self, nic, count, nbytes):
        self.nic = nic
        self.lock = threading.RLock()
        self._avail = []
        for i in range(count):
            region = Region(self, i, nbytes)
            region.rkey = nic.register(i * nbytes, nbytes)  # clean: close() deregisters every key
            self._avail.append(region)
        self._all = list(self._avail)

    def claim(self):
        """A region with one pin; raises OutOfRegions."""
        with self.lock:
            if not self._avail:
                raise OutOfRegions()
            region = self._avail.pop()  # clean: returned with one pin
            region.pins = 1
            return region

    def claim_n(self, n):
        """n regions or OutOfRegions."""
        got = []
        try:
            for _ in range(n):
                got.append(self.claim())  # clean: near miss, unpinned again before the exception goes on
        except OutOfRegions:
            for region in got:
                region.unpin()
            raise
        return got

    def _return(self, region):
        self._avail.append(region)

    def in_use(self):
        with self.lock:
            return len(self._all) - len(self._avail)

    def close(self):
        if self.in_use():
            log.warning("%d regions in use at close", self.in_use())
        for region in self._all:
            self.nic.deregister(region.rkey)
