"""Published versions. A version lives while it is the latest or somebody holds it."""
import threading


class Version:
    def __init__(self, number, blocks):
        self.number = number
        self.blocks = blocks
        self.refs = 1          # of the book

    def nbytes(self):
        return sum(b.used for b in self.blocks)


class VersionBook:
    def __init__(self, arena):
        self.arena = arena
        self.latest = None
        self._known = {}
        self._lock = threading.Lock()

    def publish(self, blocks):
        with self._lock:
            number = self.latest.number + 1 if self.latest else 1
            old, self.latest = self.latest, Version(number, blocks)
            self._known[number] = self.latest
        if old is not None:
            self.drop(old)
        return number

    def hold_latest(self):
        """The latest version with one more reference, None before the first."""
        with self._lock:
            if self.latest is not None:
                self.latest.refs += 1
            return self.latest

    def hold(self, number):
        with self._lock:
            version = self._known.get(number)
            if version is not None:
                version.refs += 1
            return version

    def drop(self, version):
        with self._lock:
            version.refs -= 1
            if version.refs:
                return
            del self._known[version.number]
        for block in version.blocks:
            self.arena.checkin(block)

    def close(self):
        last, self.latest = self.latest, None
        if last is not None:
            self.drop(last)
