# take: P.advance()
# give: P.consume(X)
# gets: optional
# type: PrefetchWindow
import threading


class PrefetchWindow:
    """Sequence numbers at most `depth` ahead of the oldest unconsumed batch."""

    def __init__(self, depth):
        self.depth = depth
        self._next_seq = 0
        self._pending = set()
        self._lock = threading.Lock()
        self.stalls = 0

    def _oldest(self):
        return min(self._pending, default=self._next_seq)

    def advance(self):
        with self._lock:
            if self._next_seq - self._oldest() >= self.depth:
                self.stalls += 1
                return None
            seq = self._next_seq
            self._pending.add(seq)
            self._next_seq += 1
            return seq

    def consume(self, seq):
        with self._lock:
            if seq not in self._pending:
                raise ValueError(f"batch {seq} is not outstanding")
            self._pending.remove(seq)
