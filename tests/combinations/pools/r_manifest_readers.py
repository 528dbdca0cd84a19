# take: P.begin_read(key)
# give: P.end_read(key)
# gets: answer
# type: ManifestGuard
import threading


class _CountsMixin:
    def _bump(self, step):
        self._readers[step] = self._readers.get(step, 0) + 1

    def _drop(self, step):
        n = self._readers[step] - 1
        if n:
            self._readers[step] = n
        else:
            self._readers.pop(step)


class ManifestGuard(_CountsMixin):
    """Keeps the checkpoint janitor from deleting a step somebody restores from."""

    def __init__(self):
        self._readers = {}
        self._doomed = set()
        self._lk = threading.Lock()

    def begin_read(self, step):
        with self._lk:
            if step in self._doomed:
                return False
            self._bump(step)
            return True

    def end_read(self, step):
        with self._lk:
            self._drop(step)

    def doom(self, step):
        with self._lk:
            if step in self._readers:
                return False
            self._doomed.add(step)
            return True
