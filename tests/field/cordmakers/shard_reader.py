"""Streaming reader for remote dataset shards.

Connections are pooled per host, prefetch permits bound the number of shards in
flight and a small page cache holds decompressed pages by reference.
"""
import collections
import io
import logging
import socket
import tarfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

logger = logging.getLogger(__name__)


class HostConn:
    def __init__(self, host, port):
        self.host = host
        self.port = port
        self.sock = socket.create_connection((host, port), timeout=30)  # clean: closed in close()
        self.broken = False

    def get(self, path, start=0, end=None):
        self.sock.sendall(f"GET {path} {start} {end or ''}\n".encode())
        size = int.from_bytes(self._exact(8), "little")
        return self._exact(size)

    def _exact(self, n):
        parts = []
        while n:
            data = self.sock.recv(min(n, 1 << 20))
            if not data:
                self.broken = True
                return b""
            parts.append(data)
            n -= len(data)
        return b"".join(parts)

    def close(self):
        self.sock.close()


class ConnPool:
    """Idle connections by host; a broken one is closed, not kept."""

    def __init__(self, port=9000, per_host=4):
        self.port = port
        self.idle = collections.defaultdict(list)
        self.count = collections.Counter()
        self.per_host = per_host
        self.cv = threading.Condition()

    def dial(self, host):
        with self.cv:
            while not self.idle[host] and self.count[host] >= self.per_host:
                self.cv.wait()
            if self.idle[host]:
                return self.idle[host].pop()  # clean: returned to the caller
            self.count[host] += 1
        return HostConn(host, self.port)  # clean: returned to the caller

    def dial_fresh(self, host, max_age, ages):
        with self.cv:
            while self.idle[host]:
                conn = self.idle[host].pop()  # leak: connections that are too old are neither closed nor uncounted
                if ages.get(id(conn), 0) <= max_age:
                    return conn
        return self.dial(host)  # clean: returned to the caller

    def hang_up(self, conn):
        with self.cv:
            if conn.broken:
                self.count[conn.host] -= 1
                conn.close()
            else:
                self.idle[conn.host].append(conn)
            self.cv.notify()

    @contextmanager
    def call(self, host):
        conn = self.dial(host)  # clean: hung up in the finally of the context manager
        try:
            yield conn
        finally:
            self.hang_up(conn)

    def close_all(self):
        with self.cv:
            for conns in self.idle.values():
                for conn in conns:
                    conn.close()
            self.idle.clear()


class PageCache:
    """Pages by key; pin() holds a page, unpin() lets it go."""

    def __init__(self, limit):
        self.limit = limit
        self.pages = collections.OrderedDict()
        self.pins = collections.Counter()
        self.lock = threading.Lock()

    def pin(self, key):
        with self.lock:
            page = self.pages.get(key)
            if page is None:
                return None
            self.pins[key] += 1
            self.pages.move_to_end(key)
            return page

    def install(self, key, page):
        with self.lock:
            self.pages[key] = page
            for old in list(self.pages):
                if len(self.pages) <= self.limit:
                    break
                if not self.pins[old]:
                    del self.pages[old]

    def unpin(self, key):
        with self.lock:
            self.pins[key] -= 1


class ShardReader:
    def __init__(self, pool, cache, hosts, prefetch=8):
        self.pool = pool
        self.cache = cache
        self.hosts = hosts
        self.permits = threading.BoundedSemaphore(prefetch)
        self.exec = ThreadPoolExecutor(prefetch)
        self.ready = {}

    def host_of(self, shard):
        return self.hosts[zlib.crc32(shard.encode()) % len(self.hosts)]

    def fetch(self, shard):
        with self.pool.call(self.host_of(shard)) as conn:  # clean: hung up at the end of the with statement
            return conn.get(shard)

    def fetch_range(self, shard, start, end):
        conn = self.pool.dial(self.host_of(shard))  # leak: an empty reply returns without hang_up()
        data = conn.get(shard, start, end)
        if not data:
            logger.warning("empty range %s [%s:%s]", shard, start, end)
            return None
        self.pool.hang_up(conn)
        return data

    def page(self, shard, index, size=1 << 20):
        key = (shard, index)
        page = self.cache.pin(key)  # clean: unpinned after the copy, None-checked
        if page is not None:
            out = bytes(page)
            self.cache.unpin(key)
            return out
        data = self.fetch_range(shard, index * size, (index + 1) * size)
        if data is not None:
            self.cache.install(key, data)
        return data

    def peek(self, shard, index, n):
        page = self.cache.pin((shard, index))  # leak: a short page returns without unpin()
        if page is None:
            return b""
        if len(page) < n:
            return bytes(page)
        head = bytes(page[:n])
        self.cache.unpin((shard, index))
        return head

    def prefetch(self, shard):
        if shard in self.ready:
            return
        self.permits.acquire()  # clean: near miss, released by take() when the shard is used
        self.ready[shard] = self.exec.submit(self.fetch, shard)

    def take(self, shard):
        fut = self.ready.pop(shard, None)
        if fut is None:
            return self.fetch(shard)
        try:
            return fut.result()
        finally:
            self.permits.release()

    def try_prefetch(self, shard):
        if not self.permits.acquire(blocking=False):  # leak: a shard that is ready already returns with the permit
            return False
        if shard in self.ready:
            return True
        self.ready[shard] = self.exec.submit(self.fetch, shard)
        return True

    def samples(self, shards):
        shards = list(shards)
        for k, shard in enumerate(shards):
            if k + 1 < len(shards):
                self.prefetch(shards[k + 1])
            data = self.take(shard)
            if not data:
                continue
            with closing(tarfile.open(fileobj=io.BytesIO(data))) as tar:  # clean: closed by closing()
                for member in tar:
                    if not member.isfile():
                        continue
                    yield member.name, tar.extractfile(member).read()

    def index(self, shards):
        out = {}
        conn, host = None, None
        for shard in sorted(shards, key=self.host_of):
            if self.host_of(shard) != host:
                if conn is not None:
                    self.pool.hang_up(conn)
                host = self.host_of(shard)
                conn = self.pool.dial(host)  # clean: near miss, the one of the last host is hung up first, the final one below
            out[shard] = conn.get(shard + ".idx")
        if conn is not None:
            self.pool.hang_up(conn)
        return out

    def sizes(self, shards):
        out = {}
        conn, host = None, None
        for shard in sorted(shards, key=self.host_of):
            if self.host_of(shard) != host:
                host = self.host_of(shard)
                conn = self.pool.dial(host)  # leak: changing the host rebinds conn without hang_up()
            out[shard] = len(conn.get(shard + ".idx"))
        if conn is not None:
            self.pool.hang_up(conn)
        return out

    def shutdown(self):
        for shard in list(self.ready):
            self.take(shard)
        self.exec.shutdown()
        self.pool.close_all()
