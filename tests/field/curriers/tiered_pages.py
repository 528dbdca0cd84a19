"""Device and host page tiers behind one facade."""
from __future__ import annotations

from typing import Dict, List, Optional


class PageTier:
    def __init__(self, name: str, n: int) -> None:
        self.name = name
        self._pages = list(range(n))
        self.used = 0

    def grab(self) -> Optional[int]:
        if not self._pages:
            return None
        self.used += 1
        return self._pages.pop()

    def ungrab(self, page: int) -> None:
        self.used -= 1
        self._pages.append(page)


class QuotaTier:
    """A tier with a quota per tenant."""

    def __init__(self, tier: PageTier, quota: int) -> None:
        self.tier = tier
        self.quota = quota
        self.by_tenant: Dict[str, int] = {}

    def grab_for(self, tenant: str) -> Optional[int]:
        if self.by_tenant.get(tenant, 0) >= self.quota:
            return None
        page = self.tier.grab()  # clean: near miss, the quota is checked before; handed to the caller
        if page is not None:
            self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + 1
        return page

    def grab_late(self, tenant: str) -> Optional[int]:
        page = self.tier.grab()  # leak: above the quota None is returned with the page taken
        n = self.by_tenant.get(tenant, 0) + 1
        if n > self.quota:
            return None
        self.by_tenant[tenant] = n
        return page

    def ungrab_for(self, tenant: str, page: int) -> None:
        self.by_tenant[tenant] -= 1
        self.tier.ungrab(page)


class PageFacade:
    def __init__(self, device: QuotaTier, host: QuotaTier) -> None:
        self.device = device
        self.host = host
        self.where: Dict[int, QuotaTier] = {}
        self.pages: Dict[int, int] = {}
        self._next = 0

    def open_page(self, tenant: str) -> Optional[int]:
        """A facade id for a page of either tier."""
        tier = self.device
        page = self.device.grab_for(tenant)  # clean: near miss, the host is asked only where it was None; kept under its id
        if page is None:
            tier = self.host
            page = self.host.grab_for(tenant)  # clean: kept under its id
        if page is None:
            return None
        self._next += 1
        self.where[self._next] = tier
        self.pages[self._next] = page
        return self._next

    def close_page(self, tenant: str, pid: int) -> None:
        tier = self.where.pop(pid)
        tier.ungrab_for(tenant, self.pages.pop(pid))

    def demote(self, tenant: str, pid: int) -> bool:
        page = self.host.grab_for(tenant)  # clean: near miss, given back for a page that is on the host, else takes its place
        if page is None:
            return False
        if self.where[pid] is self.host:
            self.host.ungrab_for(tenant, page)
            return False
        self.device.ungrab_for(tenant, self.pages[pid])
        self.where[pid], self.pages[pid] = self.host, page
        return True

    def promote(self, tenant: str, pid: int) -> bool:
        page = self.device.grab_for(tenant)  # leak: a page that is on the device already returns without ungrab
        if page is None:
            return False
        if self.where[pid] is self.device:
            return True
        self.host.ungrab_for(tenant, self.pages[pid])
        self.where[pid], self.pages[pid] = self.device, page
        return True


class Tenant:
    def __init__(self, name: str, facade: PageFacade) -> None:
        self.name = name
        self.facade = facade
        self.ids: List[int] = []
        self.pinned: Optional[int] = None

    def _open(self) -> Optional[int]:
        return self.facade.open_page(self.name)  # clean: handed to the caller

    def _close(self, pid: int) -> None:
        self.facade.close_page(self.name, pid)

    def extend(self, n: int) -> int:
        for i in range(n):
            pid = self._open()  # clean: in the list, closed in reset
            if pid is None:
                return i
            self.ids.append(pid)
        return n

    def reset(self) -> None:
        while self.ids:
            self._close(self.ids.pop())

    def shrink(self, n: int) -> None:
        for pid in self.ids[n:]:
            self._close(pid)
        del self.ids[n:]

    def temporary(self, work) -> Optional[int]:
        pid = self._open()  # clean: closed in the finally
        if pid is None:
            return None
        try:
            return work(pid)
        finally:
            self._close(pid)

    def probe(self) -> bool:
        pid = self._open()  # leak: nothing closes the probe page
        return pid is not None

    def double(self) -> bool:
        a = self._open()  # leak: not closed where b could not be opened
        if a is None:
            return False
        b = self._open()  # clean: closed at the end
        if b is None:
            return False
        self._close(b)
        self._close(a)
        return True

    def pin(self) -> bool:
        pid = self._open()  # leak: a page pinned before is overwritten
        if pid is None:
            return False
        self.pinned = pid
        return True

    def unpin(self) -> None:
        if self.pinned is not None:
            self._close(self.pinned)
            self.pinned = None

    def spare(self, keep: bool) -> Optional[int]:
        pid = self._open()  # clean: near miss, closed unless it is kept and then returned
        if pid is not None and not keep:
            self._close(pid)
            pid = None
        return pid


def late_page(quota: QuotaTier, tenant: str, used: List[int]) -> int:
    page = quota.grab_late(tenant)  # leak: a page that is odd is neither listed nor given back
    if page is None:
        return -1
    if page % 2:
        return -1
    used.append(page)
    return len(used)


if __name__ == "__main__":
    dev, host = QuotaTier(PageTier("dev", 3), 2), QuotaTier(PageTier("host", 3), 3)
    t = Tenant("a", PageFacade(dev, host))
    print(t.extend(4), t.facade.demote("a", 1), t.temporary(lambda p: p))
    t.shrink(2); t.reset()
    print(dev.tier.used, host.tier.used)
