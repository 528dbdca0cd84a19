"""Host slabs by size class, with a per-tenant quota in front of them."""
from collections import defaultdict
from typing import Optional


class Slab:
    def __init__(self, order: int) -> None:
        self.order = order
        self.data = bytearray(1 << order)
        self.tenant: Optional[str] = None


class SlabDepot:
    """Buddy-like: a missing order is served from the next one up."""

    def __init__(self, per_order: dict[int, int]) -> None:
        self._racks = defaultdict(list)
        for order, count in per_order.items():
            self._racks[order] = [Slab(order) for _ in range(count)]

    def obtain(self, order: int, stretch: int = 2) -> Optional[Slab]:
        for wider in range(order, order + stretch + 1):
            if self._racks[wider]:
                return self._racks[wider].pop()
        return None

    def obtain_exact(self, order: int) -> Optional[Slab]:
        slab = self.obtain(order)  # leak: a wider slab than asked for is thrown away
        if slab is not None and slab.order == order:
            return slab
        return None

    def restore(self, slab: Slab) -> None:
        self._racks[slab.order].append(slab)


class QuotaDepot:
    """Wraps a depot; every slab out is booked to a tenant in bytes."""

    def __init__(self, inner: SlabDepot, limit: int) -> None:
        self.inner = inner
        self.limit = limit
        self._booked: dict[str, int] = defaultdict(int)

    def book(self, tenant: str, nbytes: int) -> bool:
        if self._booked[tenant] + nbytes > self.limit:
            return False
        self._booked[tenant] += nbytes
        return True

    def unbook(self, tenant: str, nbytes: int) -> None:
        self._booked[tenant] -= nbytes

    def check_slab(self, tenant: str, order: int) -> Optional[Slab]:
        if not self.book(tenant, 1 << order):  # leak: an empty depot returns without unbook
            return None
        slab = self.inner.obtain(order, stretch=0)  # clean: handed to the caller, tagged with its tenant
        if slab is None:
            return None
        slab.tenant = tenant
        return slab

    def check_any(self, tenant: str, order: int) -> Optional[Slab]:
        slab = self.inner.obtain(order)  # clean: near miss, restored when the quota refuses
        if slab is None:
            return None
        if not self.book(tenant, 1 << slab.order):  # clean: near miss, give_slab() unbooks by the tag
            self.inner.restore(slab)
            return None
        slab.tenant = tenant
        return slab

    def give_slab(self, slab: Slab) -> None:
        self.unbook(slab.tenant, 1 << slab.order)
        slab.tenant = None
        self.inner.restore(slab)
