import threading


class Version:
    def __init__(self, number, buffer):
        self.number = number
        self.buffer = buffer
        self.refs = 0
        self.retired = False


class WeightStore:
    """Versions of the policy. A buffer is used again when its version is retired and not referenced."""

    def __init__(self, buffers, initial):
        self._lock = threading.Lock()
        self._buffers = list(buffers)
        self.current = Version(0, initial)

    def publish(self, number, fill):
        with self._lock:
            if not self._buffers:
                return False
            buffer = self._buffers.pop()  # leak: a number that isn't newer returns without putting the buffer back
        fill(buffer)
        with self._lock:
            old = self.current
            if number <= old.number:
                return False
            self.current = Version(number, buffer)
            old.retired = True
            self._recycle(old)
        return True

    def acquire(self, version=None):
        """One more reference to a version that the caller has, or to the newest."""
        with self._lock:
            version = version or self.current
            version.refs += 1
            return version

    def release(self, version):
        with self._lock:
            version.refs -= 1
            self._recycle(version)

    def _recycle(self, version):
        if version.retired and version.refs == 0:
            self._buffers.append(version.buffer)
