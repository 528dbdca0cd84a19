# take: P.register(n)
# give: X.deregister()
# gets: value
# type: RegionCache
class MemoryRegion:
    __slots__ = ("owner", "buf", "rkey", "live")

    def __init__(self, owner, nbytes, rkey):
        self.owner, self.buf, self.rkey, self.live = owner, bytearray(nbytes), rkey, False

    def deregister(self):
        if self.live:
            self.live = False
            self.owner._cached.append(self)


class RegionCache:
    """Registering memory with the NIC is slow, so deregistered regions are only set aside."""

    def __init__(self):
        self._cached = []
        self._next_rkey = 0x1000

    def register(self, nbytes):
        fits = [r for r in self._cached if len(r.buf) >= nbytes]
        if fits:
            region = min(fits, key=lambda r: len(r.buf))
            self._cached.remove(region)
        else:
            region = MemoryRegion(self, nbytes, self._next_rkey)
            self._next_rkey += 1
        region.live = True
        return region
