"""The table of blobs. pin() hands out an entry that stays on the volume until unpin()."""
import logging
import threading
import time
from dataclasses import dataclass, field

from .extents import VolumeFull

logger = logging.getLogger("blobcache.cache")


class FetchError(Exception):
    pass


@dataclass
class Entry:
    key: str
    size: int
    extents: list
    digest: str
    pins: int = 0
    doomed: bool = False
    last_used: float = field(default_factory=time.monotonic)


class BlobCache:
    def __init__(self, volume, remote):
        self.volume = volume
        self.remote = remote
        self._entries = {}
        self._lock = threading.RLock()

    def _download(self, key):
        info = self.remote.head(key)
        if info is None:
            raise FetchError(f"{key}: no such blob")
        extents = self._make_room(info.size)  # leak: FetchError for a short read is raised without putting the extents back
        data = self.remote.get(key)
        if len(data) != info.size:
            raise FetchError(f"{key}: {len(data)} of {info.size} bytes")
        self.volume.write(extents, data)
        return Entry(key, info.size, extents, info.digest)

    def _make_room(self, size):
        while True:
            try:
                return self.volume.take(size)  # clean: returned to _download
            except VolumeFull:
                if not self._evict_one():
                    raise

    def _evict_one(self):
        with self._lock:
            idle = [e for e in self._entries.values() if e.pins == 0]
            if not idle:
                return False
            victim = min(idle, key=lambda e: e.last_used)
            del self._entries[victim.key]
            self.volume.put(victim.extents)
        logger.debug("evicted %s", victim.key)
        return True

    def pin(self, key):
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.pins += 1
                return entry
        fresh = self._download(key)  # clean: near miss, its extents go back at once when another thread was faster
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self.volume.put(fresh.extents)
            else:
                entry = self._entries[key] = fresh
            entry.pins += 1
            return entry

    def unpin(self, entry):
        with self._lock:
            entry.pins -= 1
            entry.last_used = time.monotonic()
            if entry.doomed and entry.pins == 0:
                self.volume.put(entry.extents)

    def doom(self, key):
        """Forget a blob; readers that are on it may finish."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            entry.doomed = True
            if entry.pins == 0:
                self.volume.put(entry.extents)

    def store(self, key, data, digest):
        """Put a blob that was made here into the cache."""
        extents = self._make_room(len(data))  # leak: when the key is there already, setdefault keeps the old entry and the new extents are nowhere
        self.volume.write(extents, data)
        with self._lock:
            self._entries.setdefault(key, Entry(key, len(data), extents, digest))

    def keys(self):
        with self._lock:
            return sorted(self._entries)
