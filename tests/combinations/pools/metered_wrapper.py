# take: P.grab(n)
# give: P.ungrab(X)
# gets: optional
# type: MeteredBlocks
import time
from contextlib import suppress


class _RawBlocks:
    def __init__(self, total):
        self.ids = set(range(total))

    def pop_many(self, k):
        if k > len(self.ids):
            return None
        return [self.ids.pop() for _ in range(k)]

    def push_many(self, ids):
        self.ids |= set(ids)


class MeteredBlocks:
    """Same as the raw pool, but with gauges; on_event is a hook for Prometheus and the like."""

    def __init__(self, total, on_event=None):
        self._inner = _RawBlocks(total)
        self._emit = on_event or (lambda *a: None)
        self.failures = 0

    def _tell(self, what, k):
        with suppress(Exception):
            self._emit(what, k, time.monotonic())

    def grab(self, k):
        ids = self._inner.pop_many(k)
        if ids is None:
            self.failures += 1
        self._tell("miss" if ids is None else "grab", k)
        return ids

    def ungrab(self, ids):
        self._inner.push_many(ids)
        self._tell("ungrab", len(ids))
