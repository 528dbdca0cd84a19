"""Communicator handles, wrapped by sessions, wrapped by collectives."""
import logging
import threading

log = logging.getLogger("comm")


class Comm:
    def __init__(self, rank, serial):
        self.rank = rank
        self.serial = serial
        self.healthy = True

    def all_reduce(self, buf):
        return sum(buf)

    def barrier(self):
        return self.healthy


class CommPool:
    def __init__(self, rank, size):
        self._cond = threading.Condition()
        self._open = [Comm(rank, i) for i in range(size)]

    def lease(self, timeout=10.0):
        with self._cond:
            while not self._open:
                if not self._cond.wait(timeout):
                    return None
            return self._open.pop()  # clean: returned to the caller

    def lease_healthy(self, timeout=10.0):
        with self._cond:
            for _ in range(len(self._open)):
                comm = self._open.pop(0)  # clean: near miss, healthy ones are returned and others go to the back
                if comm.healthy:
                    return comm
                self._open.append(comm)
        return None

    def unlease(self, comm):
        with self._cond:
            self._open.append(comm)
            self._cond.notify()


class Session:
    """First wrapper: adds logging, hands the comm straight through."""

    def __init__(self, pool, name):
        self._pool = pool
        self._name = name

    def open(self, timeout=10.0):
        comm = self._pool.lease(timeout)  # clean: near miss, only logged about and returned
        if comm is None:
            log.warning("%s: no communicator", self._name)
        return comm

    def shut(self, comm, reason=""):
        if reason:
            log.info("%s: closing %d (%s)", self._name, comm.serial, reason)
        self._pool.unlease(comm)

    def probe(self):
        comm = self.open(timeout=0.1)  # leak: a communicator that fails the barrier is not shut
        alive = comm is not None and comm.barrier()
        if alive:
            self.shut(comm, "probe")
        return alive


class Channel:
    """Second wrapper: opens once and closes by state."""

    def __init__(self, session):
        self._session = session
        self._comm = None
        self._state = "idle"

    def connect(self):
        if self._comm is not None:
            return True
        self._comm = self._session.open()  # clean: near miss, disconnect shuts whatever is there
        self._state = "ready" if self._comm is not None else "failed"
        return self._comm is not None

    def disconnect(self):
        comm, self._comm = self._comm, None
        self._state = "idle"
        if comm is not None:
            self._session.shut(comm, "disconnect")


class StatefulChannel(Channel):
    def reconnect(self):
        if self._state == "ready":
            self._state = "stale"
        self._comm = self._session.open()  # leak: a stale communicator is overwritten
        self._state = "ready" if self._comm is not None else "failed"


class Collective:
    def __init__(self, session):
        self._session = session

    def all_reduce(self, buf):
        comm = self._session.open()  # clean: shut in finally
        if comm is None:
            return None
        try:
            return comm.all_reduce(buf)
        finally:
            self._session.shut(comm)

    def all_reduce_safe(self, buf):
        comm = self._session.open()  # leak: the handler returns without shut
        if comm is None:
            return None
        try:
            total = comm.all_reduce(buf)
        except RuntimeError:
            log.exception("all_reduce")
            return None
        self._session.shut(comm)
        return total

    def all_reduce_retry(self, buf, tries):
        for _ in range(tries):
            comm = self._session.open()  # clean: near miss, shut before another try and before the return
            if comm is None:
                continue
            try:
                total = comm.all_reduce(buf)
            except RuntimeError:
                self._session.shut(comm, "failed")
                continue
            self._session.shut(comm)
            return total
        return None

    def _pair(self):
        left = self._session.open()  # clean: near miss, shut when the right one is missing, else returned
        if left is None:
            return None, None
        right = self._session.open()  # clean: returned with the left one
        if right is None:
            self._session.shut(left)
            return None, None
        return left, right

    def ring(self, a, b):
        left, right = self._pair()  # clean: both shut
        if left is None:
            return None
        out = left.all_reduce(a), right.all_reduce(b)
        self._session.shut(left)
        self._session.shut(right)
        return out

    def ring_serials(self):
        left, _ = self._pair()  # leak: the right communicator is thrown away
        if left is None:
            return None
        serial = left.serial
        self._session.shut(left)
        return serial
