import queue


class StoreBusy(Exception):
    pass


class ConnPool:
    def __init__(self, connect, size):
        self._connect = connect
        self._q = queue.LifoQueue()
        for _ in range(size):
            self._q.put(None)       # opened at first use

    def rent(self, timeout=1.0):
        try:
            conn = self._q.get(timeout=timeout)  # leak: the place of a connection that fails to open is not put back
        except queue.Empty:
            raise StoreBusy() from None
        if conn is None:
            try:
                conn = self._connect()
            except OSError as exc:
                raise StoreBusy(str(exc)) from exc
        return conn

    def give(self, conn):
        self._q.put(conn)

    def give_dead(self, conn):
        conn.close()
        self._q.put(None)


class Rented:
    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        self.conn = self.pool.rent()  # clean: near miss, dead connections go back by give_dead, others by give
        return self.conn

    def __exit__(self, et, ev, tb):
        if et is not None and issubclass(et, ConnectionError):
            self.pool.give_dead(self.conn)
            return False
        self.pool.give(self.conn)
        return False
