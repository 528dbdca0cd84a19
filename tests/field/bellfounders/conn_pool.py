"""Blocking connection pool for the inference front door (stdlib only)."""
import collections
import logging
import random
import socket
import threading
import time

logger = logging.getLogger("door.pool")


class PoolTimeout(Exception):
    pass


class Unreachable(Exception):
    pass


class UpstreamError(Exception):
    def __init__(self, status):
        super().__init__("status %d" % status)
        self.status = status


class Conn:
    MAX_IDLE = 30.0

    def __init__(self, host, sock):
        self.host = host
        self.sock = sock
        self.last_used = time.monotonic()
        self.broken = False

    def stale(self):
        return self.broken or time.monotonic() - self.last_used > self.MAX_IDLE

    def call(self, verb, payload=b""):
        self.sock.sendall(verb + b" %d\n" % len(payload) + payload)
        head = self.sock.recv(16)
        if not head:
            self.broken = True
            return 0, b""
        status, _, n = head.partition(b" ")
        self.last_used = time.monotonic()
        return int(status), self.sock.recv(int(n or 0))

    def close(self):
        self.sock.close()


class HostPool:
    """At most `limit` connections to one host, idle ones are kept in a deque."""

    def __init__(self, host, port, limit=8):
        self.host, self.port = host, port
        self._idle = collections.deque()
        self._permits = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()

    def checkout(self, timeout=1.0):
        if not self._permits.acquire(timeout=timeout):  # leak: the permit is not released when the dial is refused
            raise PoolTimeout(self.host)
        with self._lock:
            while self._idle:
                conn = self._idle.pop()  # clean: near miss, stale ones are closed and the permit still stands for the next
                if not conn.stale():
                    return conn
                conn.close()
        try:
            sock = socket.create_connection((self.host, self.port), timeout)  # clean: handed to the caller inside Conn
        except OSError as exc:
            raise Unreachable(self.host) from exc
        return Conn(self.host, sock)

    def checkin(self, conn):
        if conn.broken:
            conn.close()
        else:
            with self._lock:
                self._idle.append(conn)
        self._permits.release()

    def try_checkout(self):
        """Never waits and never dials."""
        if not self._permits.acquire(blocking=False):  # clean: released on the empty path, else goes with the connection
            return None
        with self._lock:
            conn = self._idle.popleft() if self._idle else None  # clean: handed to the caller
        if conn is None:
            self._permits.release()
        return conn

    def sweep(self):
        with self._lock:
            fresh = [c for c in self._idle if not c.stale()]
            gone = [c for c in self._idle if c.stale()]
            self._idle = collections.deque(fresh)
        for conn in gone:
            conn.close()
        return len(gone)


class Scoped:
    """`with Scoped(pool) as conn`, poisons the connection on a transport failure."""

    def __init__(self, pool):
        self._pool = pool
        self._conn = None

    def __enter__(self):
        self._conn = self._pool.checkout()  # leak: __exit__ returns early on UpstreamError
        return self._conn

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None and issubclass(exc_type, UpstreamError):
            return exc.status == 404
        if exc_type is not None:
            self._conn.broken = True
        self._pool.checkin(self._conn)
        return False


class ShardedPool:
    """Wraps one HostPool per replica; callers never see which one they got."""

    def __init__(self, replicas):
        self._pools = {p.host: p for p in replicas}

    def any(self):
        hosts = list(self._pools)
        random.shuffle(hosts)
        for host in hosts:
            conn = self._pools[host].try_checkout()  # clean: handed to the caller
            if conn is not None:
                return conn
        return self._pools[hosts[0]].checkout()  # clean: handed to the caller

    def done(self, conn):
        self._pools[conn.host].checkin(conn)

    def pair(self):
        """Two connections to different replicas for a hedged read."""
        hosts = random.sample(sorted(self._pools), 2)
        first = self._pools[hosts[0]].checkout()  # leak: not checked in when the second checkout times out
        try:
            second = self._pools[hosts[1]].checkout(timeout=0.2)  # clean: handed to the caller
        except PoolTimeout:
            logger.debug("no second replica for hedge")
            return None
        return first, second

    def healthy(self):
        up = []
        for host, pool in self._pools.items():
            conn = pool.try_checkout()  # leak: `continue` after a failing ping skips checkin
            if conn is None:
                continue
            status, _ = conn.call(b"PING")
            if status != 200:
                logger.info("replica %s answered %d", host, status)
                continue
            pool.checkin(conn)
            up.append(host)
        return up


class DoorClient:
    RETRYABLE = (502, 503)

    def __init__(self, shards, attempts=3):
        self.shards = shards
        self.attempts = attempts

    def infer(self, payload):
        for attempt in range(self.attempts):
            conn = self.shards.any()  # clean: near miss, done in finally on each turn, also before `continue`
            try:
                status, body = conn.call(b"INFER", payload)
                if status in self.RETRYABLE:
                    time.sleep(0.05 * 2 ** attempt)
                    continue
                if status != 200:
                    raise UpstreamError(status)
                return body
            finally:
                self.shards.done(conn)
        raise UpstreamError(503)

    def hedged(self, key):
        both = self.shards.pair()  # clean: both are done in the loop in finally
        if both is None:
            return None
        try:
            for conn in both:
                status, body = conn.call(b"GET", key)
                if status == 200:
                    return body
            return None
        finally:
            for conn in both:
                self.shards.done(conn)

    def upload(self, blobs):
        conn = self.shards.any()  # leak: the first connection is lost when conn is bound again after a drop
        sent = 0
        for blob in blobs:
            status, _ = conn.call(b"PUT", blob)
            if status == 0:
                conn = self.shards.any()  # leak: a second drop loses this one as well
                status, _ = conn.call(b"PUT", blob)
            sent += status == 200
        self.shards.done(conn)
        return sent


def model_card(pool, name):
    with Scoped(pool) as conn:  # leak: the UpstreamError raised in the body makes __exit__ return before checkin
        status, body = conn.call(b"CARD", name.encode())
        if status != 200:
            raise UpstreamError(status)
        return body
