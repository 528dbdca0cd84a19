"""Cache of vision encoder outputs shared between requests.

Rows of one big feature tensor are handed out as extents. Entries are counted:
an entry with users cannot be evicted. Encoding happens in a few threads, which
stage the pixels in pinned buffers.
"""
import hashlib
import logging
import queue
import threading
import time
from typing import Dict, List, Optional

import numpy as np

log = logging.getLogger("mm.encoder_cache")

MIN_HOLE = 8

class Extent:
    __slots__ = ("start", "rows")

    def __init__(self, start, rows):
        self.start = start
        self.rows = rows

class RowArena:
    def __init__(self, rows):
        self._holes: List[Extent] = [Extent(0, rows)]
        self._lock = threading.Lock()

    def alloc(self, rows) -> Optional[Extent]:
        with self._lock:
            for i, hole in enumerate(self._holes):
                if hole.rows < rows:
                    continue
                hole = self._holes.pop(i)  # leak: the tail of a split is not put back when it is under MIN_HOLE rows
                tail = hole.rows - rows
                if tail >= MIN_HOLE:
                    self._holes.insert(i, Extent(hole.start + rows, tail))
                return Extent(hole.start, rows)
        return None

    def free(self, ext: Extent):
        with self._lock:
            self._holes.append(ext)
            self._holes.sort(key=lambda h: h.start)

class PinnedStage:
    """A fixed number of page-locked buffers, kept in a queue."""

    def __init__(self, count, nbytes):
        self._q = queue.Queue()
        for _ in range(count):
            self._q.put(np.empty(nbytes, dtype=np.uint8))

    def borrow(self, timeout=1.0):
        try:
            return self._q.get(timeout=timeout)  # clean: the caller gets it
        except queue.Empty:
            return None

    def put_back(self, buf):
        self._q.put(buf)

class Entry:
    def __init__(self, key, extent):
        self.key = key
        self.extent = extent
        self.users = 0
        self.stamp = time.monotonic()
        self.dtype = "float16"

class FeatureCache:
    def __init__(self, arena: RowArena):
        self._arena = arena
        self._entries: Dict[str, Entry] = {}
        self._lock = threading.RLock()

    def pin(self, key) -> Optional[Entry]:
        """Counts one more user; unpin() counts down."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.users += 1
            entry.stamp = time.monotonic()
            return entry

    def unpin(self, entry: Entry):
        with self._lock:
            entry.users -= 1

    def reserve(self, rows) -> Optional[Extent]:
        while True:
            ext = self._arena.alloc(rows)  # clean: returned to the caller
            if ext is not None:
                return ext
            if not self._evict_one():
                return None

    def unreserve(self, ext: Extent):
        self._arena.free(ext)

    def publish(self, key, ext: Extent):
        with self._lock:
            self._entries[key] = Entry(key, ext)

    def __contains__(self, key):
        with self._lock:
            return key in self._entries

    def _evict_one(self) -> bool:
        with self._lock:
            idle = [e for e in self._entries.values() if e.users == 0]
            if not idle:
                return False
            victim = min(idle, key=lambda e: e.stamp)
            del self._entries[victim.key]
        self._arena.free(victim.extent)
        return True

class MMRequest:
    def __init__(self, rid, images, on_ready):
        self.rid = rid
        self.images = images
        self.on_ready = on_ready
        self.held: List[Entry] = []

    def done(self, cache: FeatureCache):
        for entry in self.held:
            cache.unpin(entry)
        self.held.clear()

def image_key(img: np.ndarray) -> str:
    return hashlib.sha1(img.tobytes()).hexdigest()

class EncodeWorker(threading.Thread):
    def __init__(self, cache, stage, encoder, inbox):
        super().__init__(daemon=True)
        self.cache = cache
        self.stage = stage
        self.encoder = encoder
        self.inbox = inbox

    def run(self):
        while True:
            req = self.inbox.get()
            if req is None:
                return
            if self._prepare(req):
                try:
                    req.on_ready(req)
                finally:
                    req.done(self.cache)
            else:
                req.done(self.cache)
                log.warning("request %s: not enough room", req.rid)

    def _prepare(self, req: MMRequest) -> bool:
        for img in req.images:
            key = image_key(img)
            entry = self.cache.pin(key)  # clean: near miss, kept in req.held, which done() counts down
            if entry is None:
                if not self._encode(key, img):
                    return False
                entry = self.cache.pin(key)  # clean: None or kept in req.held as well
                if entry is None:
                    return False
            req.held.append(entry)
        return True

    def _encode(self, key, img) -> bool:
        rows = self.encoder.rows_for(img.shape)
        ext = self.cache.reserve(rows)  # leak: when no staging buffer comes the extent is neither published nor unreserved, and publish() may overwrite an entry of another worker
        if ext is None:
            return False
        buf = self.stage.borrow()  # clean: put back in the finally
        if buf is None:
            log.info("staging busy, image %s put off", key[:8])
            return False
        try:
            flat = img.reshape(-1).view(np.uint8)
            buf[: flat.size] = flat
            self.encoder.run(buf, img.shape, ext.start)
        finally:
            self.stage.put_back(buf)
        self.cache.publish(key, ext)
        return True

def similarity(cache: FeatureCache, features, a: str, b: str) -> float:
    """Cosine of two cached images, 0 where one is not there."""
    left = cache.pin(a)  # leak: the return for a missing right side leaves the left one pinned
    if left is None:
        return 0.0
    right = cache.pin(b)  # clean: unpinned at the end
    if right is None:
        return 0.0
    va, vb = (features[e.start : e.start + e.rows].mean(0) for e in (left.extent, right.extent))
    cache.unpin(left)
    cache.unpin(right)
    return float(va @ vb / (np.linalg.norm(va) * np.linalg.norm(vb) + 1e-6))

def export(cache: FeatureCache, features, keys, dtype="float16"):
    out = {}
    for key in keys:
        entry = cache.pin(key)  # leak: the continue for another dtype goes round the unpin
        if entry is None:
            continue
        if entry.dtype != dtype:
            log.debug("%s is %s, not %s", key[:8], entry.dtype, dtype)
            continue
        out[key] = np.array(features[entry.extent.start :][: entry.extent.rows])
        cache.unpin(entry)
    return out

def refresh(cache: FeatureCache, encoder, stage: PinnedStage, key, img):
    """Re-encodes in place after the encoder's weights changed."""
    entry = cache.pin(key)  # clean: near miss, None needs nothing and every other path meets the finally
    buf = None
    try:
        if entry is None:
            return False
        buf = stage.borrow(timeout=5.0)  # clean: near miss, the finally tests for None
        if buf is None:
            return False
        if encoder.rows_for(img.shape) != entry.extent.rows:
            raise ValueError("image of another size under the same key")
        flat = img.reshape(-1).view(np.uint8)
        buf[: flat.size] = flat
        encoder.run(buf, img.shape, entry.extent.start)
        return True
    finally:
        if buf is not None:
            stage.put_back(buf)
        if entry is not None:
            cache.unpin(entry)

def warm(cache: FeatureCache, stage: PinnedStage, encoder, images):
    """Fills the cache before the first request, with one buffer for all."""
    buf = stage.borrow(timeout=10.0)  # leak: the return for a full arena goes past put_back
    if buf is None:
        return 0
    n = 0
    for img in images:
        key = image_key(img)
        if key in cache:
            continue
        ext = cache.reserve(encoder.rows_for(img.shape))  # clean: published under a key that was just seen to be absent
        if ext is None:
            log.info("arena full after %d images", n)
            return n
        flat = img.reshape(-1).view(np.uint8)
        buf[: flat.size] = flat
        encoder.run(buf, img.shape, ext.start)
        cache.publish(key, ext)
        n += 1
    stage.put_back(buf)
    return n
