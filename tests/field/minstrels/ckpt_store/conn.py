"""Connections to the object store gateways.

The gateways close a connection after some minutes without traffic, therefore every connection carries the time of
its last use, and connections that have been idle for too long are replaced before they are handed out.
"""
import http.client
import logging
import threading
import time

logger = logging.getLogger("ckpt_store.conn")

IDLE_LIMIT = 240.0


class StoreError(Exception):
    """The store answered, but not with what we wanted."""


class PoolClosed(StoreError):
    pass


class Connection(object):
    def __init__(self, host):
        self.host = host
        self.http = http.client.HTTPSConnection(host, timeout=60)  # clean: kept on self, close() closes it
        self.last_used = time.time()
        self.good = True

    def request(self, method, path, body=None):
        self.last_used = time.time()
        self.http.request(method, path, body=body)
        answer = self.http.getresponse()
        data = answer.read()
        if answer.status >= 500:
            self.good = False
        if answer.status >= 300:
            raise StoreError("%s %s: %d" % (method, path, answer.status))
        return answer.headers, data

    def close(self):
        self.http.close()


class ConnectionPool(object):
    def __init__(self, hosts, size):
        self.hosts = hosts
        self.idle = []
        self.slots = threading.BoundedSemaphore(size)
        self.lock = threading.Lock()
        self.closed = False
        self.opened = 0

    def get(self):
        """A connection. Blocks while `size` of them are in use."""
        self.slots.acquire()  # leak: when the pool was closed meanwhile PoolClosed is raised and the slot stays taken
        with self.lock:
            if self.closed:
                raise PoolClosed("connection pool")
            while self.idle:
                conn = self.idle.pop()  # leak: a connection that was idle for too long is skipped and not closed
                if time.time() - conn.last_used < IDLE_LIMIT:
                    return conn
                logger.debug("connection to %s was idle for too long", conn.host)
            self.opened += 1
            host = self.hosts[self.opened % len(self.hosts)]
        return Connection(host)  # clean: handed to the caller

    def put(self, conn):
        with self.lock:
            if conn.good and not self.closed:
                self.idle.append(conn)
                conn = None
        if conn is not None:
            conn.close()
        self.slots.release()

    def close(self):
        with self.lock:
            self.closed = True
            idle, self.idle = self.idle, []
        for conn in idle:
            conn.close()
