"""A cursor over the pages of a snapshot, one page ahead."""
import logging

from .frames import NoFrames, ReadError

log = logging.getLogger(__name__)


class Cursor:
    def __init__(self, snap, cache):
        self.snap = snap
        self.cache = cache
        self.keys = snap.page_keys()
        self.at = -1
        self.frame = None
        self.ahead = None

    def seek(self, i):
        if self.frame is not None:
            self.cache.unpin(self.frame)
            self.frame = None
        self.frame = self.cache.pin(self.keys[i])  # clean: near miss, the one before was unpinned, close() unpins this one
        self.at = i

    def peek(self):
        """Reads the next page so that seek() finds it in the cache."""
        if self.ahead is None and self.at + 1 < len(self.keys):
            try:
                self.ahead = self.cache.pin(self.keys[self.at + 1])  # leak: close() after an early break unpins the current frame and not the one ahead
            except (ReadError, NoFrames):
                log.debug("no read-ahead at %d", self.at)

    def __iter__(self):
        for i in range(len(self.keys)):
            self.seek(i)
            if self.ahead is not None:
                self.cache.unpin(self.ahead)
                self.ahead = None
            yield self.frame.key, self.frame.data

    def close(self):
        if self.frame is not None:
            self.cache.unpin(self.frame)
            self.frame = None
        snap, self.snap = self.snap, None
        if snap is not None:
            snap.release()
