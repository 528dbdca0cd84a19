"""Worker slots of a crawler: a ring of slots with head and tail, one at most for a domain."""
import time
from collections import deque


class PoliteSlots:
    def __init__(self, slots, gap):
        self.ring = list(range(slots))
        self.head = 0
        self.tail = slots
        self.gap = gap
        self.hot = {}
        self.recent = deque(maxlen=100)

    def __len__(self):
        return self.tail - self.head

    def enter(self, domain):
        if not len(self) or domain in self.hot:
            return None
        slot = self.ring[self.head % len(self.ring)]
        self.head += 1
        self.hot[domain] = slot
        return slot

    def depart(self, domain):
        slot = self.hot.pop(domain)
        self.ring[self.tail % len(self.ring)] = slot
        self.tail += 1
        self.recent.append((domain, time.monotonic() + self.gap))


class Crawler:
    def __init__(self, slots, http):
        self.slots = slots
        self.http = http

    def fetch(self, domain, path):
        if self.slots.enter(domain) is None:  # clean: None gives nothing, otherwise finally
            return None
        try:
            return self.http.get(domain, path)
        finally:
            self.slots.depart(domain)

    def fetch_allowed(self, domain, path):
        slot = self.slots.enter(domain)  # leak: a path the robots file forbids returns with the slot
        if slot is None:
            return None
        if path in self.http.robots(domain):
            return None
        body = self.http.get(domain, path)
        self.slots.depart(domain)
        return body

    def sitemap(self, domain):
        links = []
        if self.slots.enter(domain) is not None:  # clean: departs in the branch
            links = self.http.links(domain, "/sitemap.xml")
            self.slots.depart(domain)
        return links

    def any_alive(self, domains):
        for domain in domains:
            if self.slots.enter(domain) is None:  # leak: the first answer returns True and keeps the slot
                continue
            if self.http.head(domain) == 200:
                return True
            self.slots.depart(domain)
        return False
