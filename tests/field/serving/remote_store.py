"""Client of a remote KV store: connection pool, leases on remote keys, retries."""
from __future__ import annotations

import collections
import hashlib
import logging
import threading
import time
import typing

log = logging.getLogger("kvstore.client")


class Conn:
    def __init__(self, host: str, port: int):
        self.host, self.port = host, port
        self.broken = False
        self.data: typing.Dict[str, bytes] = {}

    def cmd(self, op: str, key: str, val: bytes = b"") -> typing.Optional[bytes]:
        if self.broken:
            raise ConnectionError(self.host)
        if op == "set":
            self.data[key] = val
            return val
        return self.data.get(key)


class ConnPool:
    def __init__(self, host: str, port: int, size: int = 4):
        self.host, self.port, self.size = host, port, size
        self._cv = threading.Condition()
        self._idle: typing.Deque[Conn] = collections.deque(Conn(host, port) for _ in range(size))

    def get_conn(self, wait: float = 1.0) -> typing.Optional[Conn]:
        with self._cv:
            if not self._idle:
                self._cv.wait(wait)
            return self._idle.popleft() if self._idle else None

    def put_conn(self, c: Conn) -> None:
        with self._cv:
            self._idle.append(Conn(self.host, self.port) if c.broken else c)
            self._cv.notify()

    def reap(self) -> int:
        """Replace broken idle connections."""
        n = 0
        with self._cv:
            for _ in range(len(self._idle)):
                c = self._idle.popleft()  # clean: near miss, a broken one is replaced by a new one
                if c.broken:
                    c = Conn(self.host, self.port)
                    n += 1
                self._idle.append(c)
        return n

    def purge(self, host: str) -> None:
        with self._cv:
            for _ in range(len(self._idle)):
                c = self._idle.popleft()  # leak: the pool loses a place for each connection of the host, with no new one made
                if c.host != host:
                    self._idle.append(c)


def with_conn(fn: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    def wrapper(self: "StoreClient", *a: typing.Any, **kw: typing.Any) -> typing.Any:
        c = self.pool.get_conn()  # clean: the wrapper puts it back in the finally
        if c is None:
            raise TimeoutError("no connection")
        try:
            return fn(self, c, *a, **kw)
        finally:
            self.pool.put_conn(c)

    return wrapper


class StoreClient:
    def __init__(self, pool: ConnPool):
        self.pool = pool
        self.tx_conn: typing.Optional[Conn] = None
        self._mutex = threading.Lock()
        self.stats: typing.Counter[str] = collections.Counter()

    @staticmethod
    def key(tokens: typing.Sequence[int]) -> str:
        return hashlib.sha1(repr(list(tokens)).encode()).hexdigest()

    @with_conn
    def get(self, c: Conn, key: str) -> typing.Optional[bytes]:
        return c.cmd("get", key)

    @with_conn
    def contains(self, c: Conn, key: str) -> bool:
        if c.cmd("get", key) is None:
            return False
        return True

    def set(self, key: str, val: bytes) -> bool:
        c = self.pool.get_conn()  # leak: the handler for a lost connection returns without a put
        if c is None:
            return False
        try:
            c.cmd("set", key, val)
        except ConnectionError:
            c.broken = True
            return False
        self.pool.put_conn(c)
        return True

    def set_retry(self, key: str, val: bytes, tries: int = 3) -> bool:
        for i in range(tries):
            c = self.pool.get_conn()  # clean: near miss, each try puts its connection back
            if c is None:
                continue
            try:
                c.cmd("set", key, val)
                return True
            except ConnectionError:
                c.broken = True
                time.sleep(0.001 * i)
            finally:
                self.pool.put_conn(c)
        return False

    def get_retry(self, key: str, tries: int = 3) -> typing.Optional[bytes]:
        c = self.pool.get_conn()  # leak: the retry overwrites it with another one
        while c is not None and tries > 0:
            try:
                val = c.cmd("get", key)
                self.pool.put_conn(c)
                return val
            except ConnectionError:
                tries -= 1
                c.broken = True
                c = self.pool.get_conn()  # leak: the same, and the last one is dropped when the tries are used up
        return None

    def begin(self) -> bool:
        if self.tx_conn is not None:
            return False
        self.tx_conn = self.pool.get_conn()  # clean: held for the transaction, commit puts it back
        return self.tx_conn is not None

    def commit(self) -> None:
        if self.tx_conn is not None:
            self.pool.put_conn(self.tx_conn)
            self.tx_conn = None

    def count(self, name: str) -> int:
        self._mutex.acquire()  # clean: released in the finally
        try:
            self.stats[name] += 1
            return self.stats[name]
        finally:
            self._mutex.release()

    def count_new(self, name: str) -> bool:
        self._mutex.acquire()  # leak: a known name returns with the lock held
        if name in self.stats:
            return False
        self.stats[name] = 1
        self._mutex.release()
        return True

    def mget(self, keys: typing.List[str]) -> typing.Dict[str, bytes]:
        out: typing.Dict[str, bytes] = {}
        c = self.pool.get_conn()  # clean: near miss, the loop has no other way out than its end
        if c is None:
            return out
        for k in keys:
            v = c.cmd("get", k)
            if v is None:
                continue
            out[k] = v
        self.pool.put_conn(c)
        return out

    def mset(self, items: typing.Dict[str, bytes]) -> int:
        n = 0
        for k, v in items.items():
            c = self.pool.get_conn()  # leak: the empty value is passed over after the connection was got
            if c is None:
                break
            if not v:
                continue
            c.cmd("set", k, v)
            self.pool.put_conn(c)
            n += 1
        return n
