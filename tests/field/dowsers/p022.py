"""Read/write lock around live weights: many decoders read, the updater writes."""
import threading


class WeightLock:
    def __init__(self):
        self._cond = threading.Condition()
        self._reading = 0
        self._writing = False

    def begin_read(self):
        with self._cond:
            while self._writing:
                self._cond.wait()
            self._reading += 1

    def end_read(self):
        with self._cond:
            self._reading -= 1
            if self._reading == 0:
                self._cond.notify_all()

    def begin_write(self):
        with self._cond:
            while self._writing or self._reading:
                self._cond.wait()
            self._writing = True

    def end_write(self):
        with self._cond:
            self._writing = False
            self._cond.notify_all()


class LiveModel:
    def __init__(self, net):
        self.net = net
        self.lock = WeightLock()

    def decode(self, batch):
        self.lock.begin_read()  # clean: end_read in finally
        try:
            return self.net(batch)
        finally:
            self.lock.end_read()

    def swap(self, state):
        self.lock.begin_write()  # leak: an older version returns with the write lock held
        if state["version"] <= self.net.version:
            return False
        self.net.load(state)
        self.lock.end_write()
        return True

    def export(self, sink):
        self.lock.begin_read()  # leak: the break out of the loop is followed by a return
        for name, p in self.net.items():
            if not sink.put(name, p):
                break
        else:
            self.lock.end_read()
        return sink.count

    def scale(self, factor):
        self.lock.begin_write()  # clean: end_write follows
        self.net.mul(factor)
        self.lock.end_write()
