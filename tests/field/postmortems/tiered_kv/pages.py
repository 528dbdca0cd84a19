"""Pages and the base class of every tier."""
from __future__ import annotations


class Page:
    def __init__(self, tier, no):
        self.tier = tier
        self.no = no
        self.locks = 0
        self.key = None


class Tier:
    def __init__(self, count):
        self._unused = [Page(self, i) for i in range(count)]

    def obtain(self, key):
        if not self._unused:
            return None
        page = self._unused.pop()  # clean: the caller obtains it
        page.key = key
        return page

    def relinquish(self, page):
        page.key = None
        page.locks = 0
        self._unused.append(page)

    def lock(self, page):
        page.locks += 1  # clean: unlock() is the caller's affair

    def unlock(self, page):
        page.locks -= 1
