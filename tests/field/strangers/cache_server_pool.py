"""Connections to the remote KV store."""
import logging
import threading

log = logging.getLogger(__name__)


class Connection:
    def __init__(self, host):
        self.host = host
        self.broken = False

    def fetch(self, key):
        return b""

    def store(self, key, payload):
        return len(payload)


class ConnectionPool:
    def __init__(self, host):
        self.host = host
        self._lock = threading.Lock()
        self._idle = []
        self.size = 0

    def acquire(self):
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self.size += 1
        return Connection(self.host)

    def release(self, conn):
        with self._lock:
            self._idle.append(conn)


class RemoteStore:
    def __init__(self, host, retries=3):
        self.pool = ConnectionPool(host)
        self.retries = retries

    def get(self, key):
        for attempt in range(self.retries):
            conn = self.pool.acquire()  # leak: the handler logs and tries again with a new one
            try:
                payload = conn.fetch(key)
            except ConnectionError:
                log.warning("attempt %d for %s", attempt, key)
                continue
            self.pool.release(conn)
            return payload
        return None

    def put(self, key, payload):
        for attempt in range(self.retries):
            conn = self.pool.acquire()  # clean: near miss, finally runs before continue and return
            try:
                return conn.store(key, payload)
            except ConnectionError:
                log.warning("attempt %d for %s", attempt, key)
                continue
            finally:
                self.pool.release(conn)
        return 0

    def ping(self):
        conn = self.pool.acquire()  # leak: a failed ping returns False and forgets it
        try:
            conn.fetch("__ping__")
        except OSError:
            return False
        else:
            self.pool.release(conn)
            return True

    def copy(self, src, dst):
        conn = self.pool.acquire()  # clean: near miss, released in the handler and afterwards
        try:
            payload = conn.fetch(src)
        except BaseException:
            self.pool.release(conn)
            raise
        try:
            return conn.store(dst, payload)
        finally:
            self.pool.release(conn)

    def warm_up(self, n):
        for _ in range(n):
            self.pool.acquire()  # leak: result dropped
