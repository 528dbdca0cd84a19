"""LIFO of connections with None for those not yet made."""
import http.client
import queue


class LazyLifo:
    def __init__(self, host, size):
        self.host = host
        self.pool = queue.LifoQueue(size)
        for _ in range(size):
            self.pool.put(None)

    def _get_conn(self, timeout=None):
        conn = self.pool.get(timeout=timeout)
        if conn is None:
            conn = http.client.HTTPConnection(self.host)
        return conn

    def _put_conn(self, conn):
        try:
            self.pool.put_nowait(conn)
        except queue.Full:
            if conn is not None:
                conn.close()

    def urlopen(self, method, path):
        conn = self._get_conn()
        try:
            conn.request(method, path)
            return conn.getresponse().read()
        finally:
            self._put_conn(conn)


class Catalogue:
    def __init__(self, pool):
        self.pool = pool

    def item(self, sku):
        conn = self.pool._get_conn()  # leak: a 404 returns with the connection
        conn.request("GET", f"/items/{sku}")
        reply = conn.getresponse()
        if reply.status == 404:
            return None
        body = reply.read()
        self.pool._put_conn(conn)
        return body

    def delete(self, sku):
        conn = self.pool._get_conn()  # clean: put back after the read
        conn.request("DELETE", f"/items/{sku}")
        status = conn.getresponse().status
        self.pool._put_conn(conn)
        return status == 204

    def stream(self, path):
        conn = self.pool._get_conn()  # clean: put back in finally
        try:
            conn.request("GET", path)
            yield from conn.getresponse()
        finally:
            self.pool._put_conn(conn)


def reset(catalogue):
    conn = catalogue.pool._get_conn(timeout=1)  # leak: closed, but its place is not given back
    conn.close()
