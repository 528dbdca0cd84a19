import threading


class Arena:
    def __init__(self, ident):
        self.ident = ident
        self.top = 0


class ArenaDepot:
    def __init__(self, n):
        self._mutex = threading.Lock()
        self._arenas = [Arena(i) for i in range(n)]

    def detach(self):
        with self._mutex:
            return self._arenas.pop()

    def reattach(self, arena):
        arena.top = 0
        with self._mutex:
            self._arenas.append(arena)


class ThreadCache:
    """One arena per thread in a thread local, and a list of full ones."""

    def __init__(self, depot, size):
        self.depot = depot
        self.size = size
        self.local = threading.local()
        self.full = []
        self.lock = threading.Lock()

    def bump(self, n):
        arena = getattr(self.local, "arena", None)
        if arena is None:
            arena = self.depot.detach()  # leak: thread_exit deletes the attribute and reattaches nothing
            self.local.arena = arena
        if arena.top + n > self.size:
            with self.lock:
                self.full.append(arena)
            arena = self.depot.detach()  # leak: thread_exit deletes the attribute and reattaches nothing
            self.local.arena = arena
        at = arena.top
        arena.top += n
        return arena.ident, at

    def collect(self):
        with self.lock:
            full, self.full = self.full, []
        for arena in full:
            self.depot.reattach(arena)
        return len(full)

    def thread_exit(self):
        arena = getattr(self.local, "arena", None)
        if arena is None:
            return 0
        used = arena.top
        del self.local.arena
        return used

    def scratch(self, func):
        arena = self.depot.detach()  # clean: reattached below
        result = func(arena)
        self.depot.reattach(arena)
        return result


class Region:
    def __init__(self, depot):
        self.depot = depot
        self.arenas = []
        self.head = depot.detach()  # clean: destroy reattaches it

    def extend(self):
        self.arenas.append(self.head)
        self.head = self.depot.detach()  # clean: becomes an element or stays head, destroy takes both

    def destroy(self):
        for arena in self.arenas:
            self.depot.reattach(arena)
        self.arenas = []
        self.depot.reattach(self.head)
