"""Background checks of cached blobs, and the set of blobs that are kept warm."""
import hashlib
import logging
import threading

from .cache import FetchError

logger = logging.getLogger("blobcache.sweeper")


class Sweeper(threading.Thread):
    def __init__(self, cache, interval=600.0):
        super().__init__(name="blob-sweeper", daemon=True)
        self._cache, self._interval = cache, interval
        self.stop = threading.Event()
        self.bad = 0

    def run(self):
        while not self.stop.wait(self._interval):
            for key in self._cache.keys():
                self._check(key)

    def _check(self, key):
        try:
            entry = self._cache.pin(key)  # leak: a bad blob is doomed, but its pin stays, so that its extents never go back
        except FetchError:
            return
        data = self._cache.volume.read(entry.extents, 0, entry.size)
        if hashlib.sha256(data).hexdigest() != entry.digest:
            logger.error("%s is damaged", key)
            self.bad += 1
            self._cache.doom(key)
            return
        self._cache.unpin(entry)


class WarmSet:
    """Pinned blobs, for adapters that must be there without delay."""

    def __init__(self, cache):
        self._cache = cache
        self._pinned = {}

    def warm(self, key):
        if key not in self._pinned:
            self._pinned[key] = self._cache.pin(key)  # clean: near miss, replace() and cool() unpin what they take out

    def replace(self, keys):
        for key in list(self._pinned):
            if key not in keys:
                self._cache.unpin(self._pinned.pop(key))
        for key in keys:
            self.warm(key)

    def cool(self):
        while self._pinned:
            self._cache.unpin(self._pinned.popitem()[1])
