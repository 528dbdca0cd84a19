"""Prefix cache: blocks keyed by content hash, kept alive by a use count."""
from collections import OrderedDict


class PrefixCache:
    def __init__(self, capacity):
        self.capacity = capacity
        self._uses = {}
        self._idle = OrderedDict()

    def ref(self, digest):
        if digest in self._idle:
            del self._idle[digest]
            self._uses[digest] = 1
        elif digest in self._uses:
            self._uses[digest] += 1
        else:
            if len(self._uses) + len(self._idle) >= self.capacity:
                self._evict_one()
            self._uses[digest] = 1
        return digest

    def unref(self, digest):
        self._uses[digest] -= 1
        if self._uses[digest] == 0:
            del self._uses[digest]
            self._idle[digest] = None

    def _evict_one(self):
        if not self._idle:
            raise MemoryError("all prefix blocks are in use")
        self._idle.popitem(last=False)


class Matcher:
    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.held = {}

    def probe(self, digest, kernel):
        self.cache.ref(digest)  # clean: released in the finally
        try:
            return kernel.peek(digest)
        finally:
            self.cache.unref(digest)

    def longest(self, digests, kernel):
        hit = 0
        for d in digests:
            self.cache.ref(d)  # leak: the break keeps the reference to the missing block
            if not kernel.resident(d):
                break
            hit += 1
            self.cache.unref(d)
        return hit

    def start(self, seq_id, digest):
        self.held[seq_id] = self.cache.ref(digest)  # clean: stored, stop() releases it

    def stop(self, seq_id):
        self.cache.unref(self.held.pop(seq_id))

    def verify(self, digest, expected, kernel):
        self.cache.ref(digest)  # leak: the mismatch branch returns without unref
        if kernel.checksum(digest) != expected:
            kernel.report(digest)
            return False
        self.cache.unref(digest)
        return True
