"""Read sections, nested and counted by thread; an updater waits for all to leave."""
import threading


class ReadCopyUpdate:
    def __init__(self):
        self._depth = {}
        self._quiet = threading.Condition()

    def read_begin(self):
        me = threading.get_ident()
        with self._quiet:
            self._depth[me] = self._depth.get(me, 0) + 1

    def read_end(self):
        me = threading.get_ident()
        with self._quiet:
            depth = self._depth[me] - 1
            if depth:
                self._depth[me] = depth
            else:
                del self._depth[me]
                self._quiet.notify_all()

    def synchronize(self):
        me = threading.get_ident()
        with self._quiet:
            self._quiet.wait_for(lambda: not (self._depth.keys() - {me}))


class Routes:
    def __init__(self, rcu):
        self.rcu = rcu
        self.current = {}

    def resolve(self, host):
        self.rcu.read_begin()  # leak: known hosts return inside the section
        table = self.current
        if host in table:
            return table[host]
        self.rcu.read_end()
        return "default"

    def hosts(self):
        self.rcu.read_begin()  # clean: ended in finally
        try:
            return sorted(self.current)
        finally:
            self.rcu.read_end()

    def install(self, table):
        self.current = table
        self.rcu.synchronize()


def longest(routes):
    routes.rcu.read_begin()  # clean: ended before the return
    best = max(routes.current, key=len, default="")
    routes.rcu.read_end()
    return best


def export(routes, sink):
    routes.rcu.read_begin()  # leak: ended only when something was written
    written = 0
    for host, target in routes.current.items():
        written += sink.write(f"{host}={target}\n")
    if written:
        routes.rcu.read_end()
