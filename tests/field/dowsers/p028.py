"""Lazily filled pool of RDMA connections: checkout, checkin, discard."""
import threading


class QpPool:
    def __init__(self, dial, maximum):
        self._dial = dial
        self._max = maximum
        self._made = 0
        self._idle = []
        self._cv = threading.Condition()

    def checkout(self, timeout=5.0):
        with self._cv:
            while not self._idle and self._made >= self._max:
                if not self._cv.wait(timeout):
                    raise TimeoutError
            if self._idle:
                return self._idle.pop()
            self._made += 1
        return self._dial()

    def checkin(self, qp):
        with self._cv:
            self._idle.append(qp)
            self._cv.notify()

    def discard(self, qp):
        qp.destroy()
        with self._cv:
            self._made -= 1
            self._cv.notify()


class RemoteKv:
    def __init__(self, pool: QpPool):
        self.pool = pool

    def read(self, addr, n):
        qp = self.pool.checkout()  # clean: checked in or discarded
        data = qp.read(addr, n)
        if qp.broken:
            self.pool.discard(qp)
            return None
        self.pool.checkin(qp)
        return data

    def write(self, addr, data):
        qp = self.pool.checkout()  # leak: the broken branch neither checks in nor discards
        ok = qp.write(addr, data)
        if not ok:
            return False
        self.pool.checkin(qp)
        return True

    def exists(self, addr):
        qp = self.pool.checkout()  # clean: finally
        try:
            return qp.probe(addr)
        finally:
            self.pool.checkin(qp)

    def read_any(self, addrs, n):
        for addr in addrs:
            qp = self.pool.checkout()  # leak: returns the data from inside the loop
            data = qp.read(addr, n)
            if data:
                return data
            self.pool.checkin(qp)
        return None
