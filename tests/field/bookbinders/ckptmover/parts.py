"""Buffers for the parts of an upload, and connections to the object store."""
import queue
import threading
import time
from contextlib import contextmanager


class Closing(RuntimeError):
    pass


class PartBuffers:
    def __init__(self, count, nbytes):
        self._sem = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._spare = [bytearray(nbytes) for _ in range(count)]
        self.closing = False
        self.nbytes = nbytes

    def rent(self):
        self._sem.acquire()  # leak: Closing is raised with the semaphore one lower
        with self._lock:
            if self.closing:
                raise Closing()
            return self._spare.pop()  # clean: goes to the caller

    def restore(self, buf):
        with self._lock:
            self._spare.append(buf)
        self._sem.release()


class Conns:
    """Idle ones are kept in a queue; at most `limit` are open."""

    def __init__(self, connect, limit):
        self._connect = connect
        self._idle = queue.LifoQueue()
        for _ in range(limit):
            self._idle.put(None)

    def borrow(self):
        conn = self._idle.get()  # clean: near miss, a place without connection gets one or is put back, and leaves with it
        if conn is None:
            try:
                conn = self._connect()  # clean: goes to the caller
            except OSError:
                self._idle.put(None)
                raise
        conn.borrowed = time.monotonic()
        return conn

    def repay(self, conn, broken=False):
        if broken:
            conn.close()
            self._idle.put(None)
        else:
            self._idle.put(conn)

    @contextmanager
    def one(self):
        conn = self.borrow()  # clean: repaid when the block ends
        broken = True
        try:
            yield conn
            broken = False
        finally:
            self.repay(conn, broken)
