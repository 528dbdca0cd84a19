"""Flat buckets and RPC stubs."""
import collections
import threading

import torch


class BucketPool:
    """Flat tensors in power-of-two size classes."""

    def __init__(self, device="cpu", max_class=26):
        self.device = device
        self._classes = {c: [] for c in range(8, max_class + 1)}
        self._lock = threading.Lock()

    @staticmethod
    def size_class(numel):
        return max(8, (numel - 1).bit_length())

    def obtain(self, numel):
        c = self.size_class(numel)
        with self._lock:
            if self._classes[c]:
                return self._classes[c].pop()
        return torch.empty(1 << c, device=self.device)

    def recycle(self, flat):
        with self._lock:
            self._classes[self.size_class(flat.numel())].append(flat)


class StubRing:
    """A fixed ring of stubs per host; a stub serves one call at a time."""

    def __init__(self, make_stub, hosts, per_host=2):
        self._rings = {h: collections.deque(make_stub(h) for _ in range(per_host)) for h in hosts}
        self._cv = threading.Condition()

    def draw(self, host, timeout=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._rings[host], timeout):
                return None
            return self._rings[host].popleft()

    def stow(self, host, stub):
        with self._cv:
            self._rings[host].append(stub)
            self._cv.notify()


class StubUse:
    def __init__(self, ring, host, timeout=10.0):
        self.ring = ring
        self.host = host
        self.timeout = timeout
        self.stub = None

    def __enter__(self):
        self.stub = self.ring.draw(self.host, self.timeout)  # clean: stowed by __exit__
        if self.stub is None:
            raise TimeoutError(self.host)
        return self.stub

    def __exit__(self, *exc):
        self.ring.stow(self.host, self.stub)
        self.stub = None
        return False
