import threading
import time


class Connection:
    def __init__(self, dsn):
        self.dsn = dsn
        self.last = 0.0

    def execute(self, text):
        self.last = time.monotonic()
        return "%s <- %s" % (self.dsn, text)


class Broker:
    def __init__(self, dsn, size):
        self._lock = threading.Lock()
        self._idle = [Connection(dsn) for _ in range(size)]

    def checkout(self):
        with self._lock:
            return self._idle.pop()

    def checkin(self, conn):
        with self._lock:
            self._idle.append(conn)


class SessionTable:
    """Keeps one connection per user session and another one per open cursor."""

    def __init__(self, broker, ttl):
        self.broker = broker
        self.ttl = ttl
        self.by_user = {}
        self.cursors = {}
        self.touched = {}

    def login(self, user):
        self.touched[user] = time.monotonic()
        if user in self.by_user:
            return
        self.by_user[user] = self.broker.checkout()  # leak: sweep deletes stale entries without checkin

    def open_cursor(self, user, number, query):
        key = (user, number)
        old = self.cursors.pop(key, None)
        if old is not None:
            self.broker.checkin(old)
        conn = self.broker.checkout()  # clean: close_cursor and logout return it
        self.cursors[key] = conn
        return conn.execute(query)

    def close_cursor(self, user, number):
        conn = self.cursors.pop((user, number), None)
        if conn is not None:
            self.broker.checkin(conn)

    def ping(self, text):
        conn = self.broker.checkout()  # clean: checked in below
        answer = conn.execute(text)
        self.broker.checkin(conn)
        return answer

    def sweep(self, now):
        stale = [u for u, t in self.touched.items() if now - t > self.ttl]
        for user in stale:
            for key in [k for k in self.cursors if k[0] == user]:
                self.close_cursor(*key)
            del self.touched[user]
            self.by_user.pop(user, None)
        return len(stale)

    def logout(self, user):
        for key in [k for k in self.cursors if k[0] == user]:
            self.close_cursor(*key)
        self.touched.pop(user, None)
        conn = self.by_user.pop(user, None)
        if conn is not None:
            conn.execute("rollback")
            self.broker.checkin(conn)
