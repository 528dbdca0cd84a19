"""Sleepable read-copy-update: two counters, the reader remembers which one it entered."""
import threading


class SleepableRcu:
    def __init__(self):
        self.idx = 0
        self.count = [0, 0]
        self.cv = threading.Condition()

    def read_lock(self):
        with self.cv:
            i = self.idx & 1
            self.count[i] += 1
            return i

    def read_unlock(self, i):
        with self.cv:
            self.count[i] -= 1
            self.cv.notify_all()

    def synchronize(self):
        with self.cv:
            old = self.idx & 1
            self.idx += 1
            self.cv.wait_for(lambda: self.count[old] == 0)


class RouteTable:
    def __init__(self):
        self.srcu = SleepableRcu()
        self.routes = []

    def replace(self, routes):
        self.routes = routes
        self.srcu.synchronize()

    def lookup(self, addr):
        i = self.srcu.read_lock()  # clean: unlocked in finally
        try:
            return next((r for r in self.routes if addr in r.net), None)
        finally:
            self.srcu.read_unlock(i)

    def gateway(self, addr):
        i = self.srcu.read_lock()  # leak: a matching route is returned inside the read section
        for r in self.routes:
            if addr in r.net:
                return r.gateway
        self.srcu.read_unlock(i)
        return None

    def size(self):
        i = self.srcu.read_lock()  # clean: unlocked before the return
        n = len(self.routes)
        self.srcu.read_unlock(i)
        return n

    def dump(self, out):
        if self.srcu.read_lock() == 0:  # leak: the index is compared and thrown away
            out.write("epoch even\n")
        for r in self.routes:
            out.write(f"{r}\n")
