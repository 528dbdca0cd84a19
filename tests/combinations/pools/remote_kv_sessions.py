# take: P.dial(key)
# give: P.hang_up(X)
# gets: value
# type: RemoteKVSessions
import time
from collections import OrderedDict


class KVSession:
    def __init__(self, url):
        self.url = url
        self.last_used = time.monotonic()
        self.closed = False

    def shutdown(self):
        self.closed = True


class RemoteKVSessions:
    """Keeps idle sessions warm, oldest first, at most `keep` of them."""

    def __init__(self, keep=4):
        self.keep = keep
        self._idle = OrderedDict()
        self._seq = 0

    def dial(self, url):
        for token in reversed(self._idle):
            if self._idle[token].url == url:
                return self._idle.pop(token)
        return KVSession(url)

    def _trim(self):
        while len(self._idle) > self.keep:
            _, stale = self._idle.popitem(last=False)
            stale.shutdown()

    def hang_up(self, session):
        if session.closed:
            return
        session.last_used = time.monotonic()
        self._idle[self._seq] = session
        self._seq += 1
        self._trim()
