"""Page cache for vector segments."""
import logging
import threading
from collections import OrderedDict

log = logging.getLogger(__name__)


class ReadError(IOError):
    pass


class NoFrames(RuntimeError):
    pass


class Frame:
    __slots__ = ("data", "key", "pins")

    def __init__(self):
        self.data = bytearray(4096)
        self.key = None
        self.pins = 0


class PageCache:
    """A page is pinned while its frame is looked at."""

    def __init__(self, n, disk):
        self.disk = disk
        self._spare = [Frame() for _ in range(n)]
        self._table = OrderedDict()
        self._mu = threading.RLock()

    def _victim(self):
        if self._spare:
            return self._spare.pop()  # clean: returned
        for key, frame in self._table.items():
            if frame.pins == 0:
                del self._table[key]
                return frame
        raise NoFrames()

    def pin(self, key):
        with self._mu:
            frame = self._table.get(key)
            if frame is None:
                frame = self._victim()  # leak: ReadError is raised with the frame neither in the table nor spare
                if self.disk.read_into(key, frame.data) != len(frame.data):
                    raise ReadError(f"{key}: short read")
                frame.key = key
                self._table[key] = frame
            self._table.move_to_end(key)
            frame.pins += 1
            return frame

    def unpin(self, frame):
        with self._mu:
            frame.pins -= 1

    def invalidate(self, key):
        """False when the page is in use."""
        with self._mu:
            frame = self._table.get(key)
            if frame is None:
                return True
            if frame.pins:
                return False
            del self._table[key]
            self._spare.append(frame)
            return True
