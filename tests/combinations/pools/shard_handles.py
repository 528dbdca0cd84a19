# take: P.open_shard(key)
# give: P.close_shard(X)
# gets: value
# type: ShardLibrary
import io
from collections import OrderedDict


class ShardLibrary:
    """Dataset shard files. Idle handles stay open (LRU, max_idle), one reader per handle."""

    def __init__(self, opener=None, max_idle=64):
        self._opener = opener or (lambda path: io.open(path, "rb"))
        self._idle = OrderedDict()  # path -> list of handles
        self._lent = {}  # id(handle) -> (path, handle)
        self._max_idle = max_idle

    def open_shard(self, path):
        stack = self._idle.get(path)
        if stack:
            fh = stack.pop()
            if not stack:
                del self._idle[path]
        else:
            fh = self._opener(path)
        self._lent[id(fh)] = (path, fh)
        return fh

    def close_shard(self, fh):
        path, _ = self._lent.pop(id(fh))
        self._idle.setdefault(path, []).append(fh)
        self._idle.move_to_end(path)
        while sum(map(len, self._idle.values())) > self._max_idle:
            oldest, stack = next(iter(self._idle.items()))
            victim = stack.pop(0)
            if not stack:
                del self._idle[oldest]
            victim.close()
