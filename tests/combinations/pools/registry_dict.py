# take: P.register(self.name)
# give: P.unregister(X)
# gets: value
import itertools


class Pool:
    def __init__(self):
        self._ids = itertools.count()
        self._live = {}

    def register(self, what):
        handle = next(self._ids)
        self._live[handle] = what
        return handle

    def unregister(self, handle):
        self._live.pop(handle, None)
