"""Concrete tiers."""
from __future__ import annotations

from contextlib import contextmanager

from .pages import Tier


class DeviceTier(Tier):
    def obtain_or_evict(self, key, victims):
        page = self.obtain(key)  # clean: returned when there was one
        while page is None and victims:
            self.relinquish(victims.pop())
            page = self.obtain(key)  # clean: near miss, only rebinds None
        return page

    @contextmanager
    def pinned(self, page):
        self.lock(page)  # clean: unlocked in the finally
        try:
            yield page
        finally:
            self.unlock(page)


class HostTier(Tier):
    def __init__(self, count, writable=True):
        super().__init__(count)
        self.writable = writable

    def write_back(self, src):
        dst = self.obtain(src.key)  # leak: a read-only tier returns None after the page was obtained
        if dst is None or not self.writable:
            return None
        src.tier.relinquish(src)
        return dst

    def mirror(self, src):
        dst = self.obtain(src.key)  # clean: near miss, a read-only tier relinquishes before it says None
        if dst is not None and not self.writable:
            self.relinquish(dst)
            return None
        return dst


def make_tiers(device, host):
    return DeviceTier(device), HostTier(host)
