"""Sessions with a time to live, kept in a heap."""
import heapq
import itertools


class SessionIds:
    def __init__(self):
        self._counter = itertools.count()
        self._valid = set()

    def begin_session(self):
        sid = next(self._counter)
        self._valid.add(sid)
        return sid

    def end_session(self, sid):
        self._valid.discard(sid)


class Expiry:
    def __init__(self, ids, clock):
        self.ids = ids
        self.clock = clock
        self.heap = []
        self.quiet_heap = []
        self.named = {}

    def open(self, ttl):
        sid = self.ids.begin_session()  # clean: near miss, sits in the heap until tick or shutdown ends it
        heapq.heappush(self.heap, (self.clock() + ttl, sid))
        return sid

    def tick(self):
        now = self.clock()
        while self.heap and self.heap[0][0] <= now:
            _, sid = heapq.heappop(self.heap)
            self.ids.end_session(sid)

    def open_quiet(self, ttl):
        sid = self.ids.begin_session()  # leak: tick_quiet pops expired ones without ending them
        heapq.heappush(self.quiet_heap, (self.clock() + ttl, sid))

    def tick_quiet(self):
        now = self.clock()
        expired = 0
        while self.quiet_heap and self.quiet_heap[0][0] <= now:
            heapq.heappop(self.quiet_heap)
            expired += 1
        return expired

    def shutdown(self):
        for _, sid in self.heap + self.quiet_heap:
            self.ids.end_session(sid)
        self.heap, self.quiet_heap = [], []
        for sid in self.named.values():
            self.ids.end_session(sid)
        self.named = {}

    def rename(self, old, new):
        """Moves a session to another name; whoever had that name is ended."""
        if old == new or old not in self.named:
            return
        evicted = self.named.get(new)
        self.named[new] = self.named.pop(old)
        if evicted is not None:
            self.ids.end_session(evicted)

    def open_named(self, name):
        known = self.named.get(name)
        if known is not None:
            return known
        self.named[name] = self.ids.begin_session()  # clean: near miss, rename ends the evicted one, shutdown the rest
        return self.named[name]

    def once(self, fn):
        sid = self.ids.begin_session()  # clean: near miss, ended in finally although the handler swallows
        try:
            return fn(sid)
        except KeyError:
            return None
        finally:
            self.ids.end_session(sid)

    def once_or_keep(self, fn):
        sid = self.ids.begin_session()  # leak: the handler returns without ending it
        try:
            value = fn(sid)
        except KeyError:
            return None
        self.ids.end_session(sid)
        return value
