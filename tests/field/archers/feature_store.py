"""
Reads document features for retrieval-augmented generation from a relational store.

The store speaks a small binary protocol, and its connections are expensive, so
they are kept in a pool. Every cursor is a resource of the server: it has to be
closed, because a connection that goes back into the pool keeps its cursors.
"""

import logging
import queue
import threading
import time
from contextlib import contextmanager

LOGGER = logging.getLogger(__name__)

STOP = object()


class PoolTimeout(Exception):
    """No connection became available in time."""


class TransientError(Exception):
    """The server asked us to try again."""


class Cursor:
    def __init__(self, wire, handle):
        self._wire = wire
        self._handle = handle

    def execute(self, statement, *parameters):
        self._wire.execute(self._handle, statement, parameters)

    def fetchone(self):
        return self._wire.fetch(self._handle, 1)

    def fetchmany(self, count):
        return self._wire.fetch(self._handle, count)

    def close(self):
        self._wire.close_cursor(self._handle)


class Connection:
    def __init__(self, wire):
        self._wire = wire
        self.created = time.time()

    def is_alive(self):
        return self._wire.ping()

    def cursor(self):
        handle = self._wire.open_cursor()  # clean: the cursor that is returned closes the handle
        return Cursor(self._wire, handle)

    def close(self):
        self._wire.disconnect()


class ConnectionPool:
    def __init__(self, factory, limit):
        self._factory = factory
        self._limit = limit
        self._total = 0
        self._idle = []
        self._condition = threading.Condition()

    def acquire(self, timeout=5.0):
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                if self._idle:
                    connection = self._idle.pop()  # leak: a stale connection is dropped, not closed and still counted in the total
                    if not connection.is_alive():
                        LOGGER.info("stale connection, %.0f s old", time.time() - connection.created)
                        continue
                    return connection
                if self._total < self._limit:
                    self._total += 1
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise PoolTimeout("%d connections in use" % self._total)
                self._condition.wait(remaining)
        try:
            return self._factory()  # clean: returned to the caller, and the count is taken back when it fails
        except OSError:
            with self._condition:
                self._total -= 1
                self._condition.notify()
            raise

    def release(self, connection, broken=False):
        with self._condition:
            if broken:
                self._total -= 1
            else:
                self._idle.append(connection)
            self._condition.notify()
        if broken:
            connection.close()

    @contextmanager
    def connection(self):
        connection = self.acquire()  # clean: the finally releases it on every way out
        broken = False
        try:
            yield connection
        except TransientError:
            broken = True
            raise
        finally:
            self.release(connection, broken)


class Snapshot:
    """A read transaction that lives across several calls."""

    def __init__(self, pool):
        self._pool = pool
        self._connection = pool.acquire(timeout=30.0)  # clean: close() releases it
        self._cursor = self._connection.cursor()  # leak: close() gives the connection back and forgets the cursor
        self.reads = 0

    def get(self, key):
        self._cursor.execute("SELECT value FROM features WHERE key = ?", key)
        self.reads += 1
        return self._cursor.fetchone()

    def close(self):
        if self._connection is None:
            return
        LOGGER.debug("snapshot closed after %d reads", self.reads)
        self._pool.release(self._connection)
        self._connection = None


class FeatureReader:
    def __init__(self, pool, retries=3):
        self._pool = pool
        self._retries = retries

    def embeddings(self, ids):
        connection = self._pool.acquire()  # clean: every return is inside the try and the finally releases
        try:
            if not ids:
                return {}
            cursor = connection.cursor()  # clean: the inner finally closes it
            try:
                cursor.execute("SELECT id, vector FROM embeddings WHERE id IN (?)", ids)
                rows = cursor.fetchmany(len(ids))
                if not rows:
                    return {}
                return {row[0]: row[1] for row in rows}
            finally:
                cursor.close()
        finally:
            self._pool.release(connection)

    def document(self, document_id):
        connection = self._pool.acquire()  # clean: released by the finally
        try:
            cursor = connection.cursor()  # leak: a document that does not exist returns without closing the cursor
            cursor.execute("SELECT title, body FROM documents WHERE id = ?", document_id)
            row = cursor.fetchone()
            if row is None:
                LOGGER.warning("document %s not found", document_id)
                return None
            cursor.close()
            return {"title": row[0], "body": row[1]}
        finally:
            self._pool.release(connection)

    def retrying(self, operation):
        for attempt in range(self._retries):
            connection = self._pool.acquire()  # leak: only the last failure releases it, an earlier one sleeps and acquires again
            try:
                result = operation(connection)
            except TransientError:
                if attempt + 1 == self._retries:
                    self._pool.release(connection, broken=True)
                    raise
                time.sleep(0.1 * 2 ** attempt)
                continue
            self._pool.release(connection)
            return result
        return None

    def scan(self, statement, page=512):
        with self._pool.connection() as connection:  # clean: the context manager releases
            cursor = connection.cursor()  # clean: near miss, the finally also runs when the consumer closes the generator
            try:
                cursor.execute(statement)
                while True:
                    rows = cursor.fetchmany(page)
                    if not rows:
                        return
                    yield from rows
            finally:
                cursor.close()

    def warm_up(self, count):
        held = []
        for _ in range(count):
            try:
                held.append(self._pool.acquire(timeout=0.5))  # clean: near miss, a failure ends the loop and all that were got are released
            except (PoolTimeout, OSError):
                LOGGER.info("warm-up got only %d connections", len(held))
                break
        for connection in held:
            self._pool.release(connection)


class ShardedLoader:
    """Reads shards of the feature table in threads, one connection for each."""

    def __init__(self, pool, workers):
        self._pool = pool
        self._shards = queue.Queue()
        self._results = queue.Queue()
        self._connections = {}
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def _work(self, number):
        self._connections[number] = self._pool.acquire()  # leak: load() clears the table at the end without releasing the connections
        while True:
            shard = self._shards.get()
            if shard is STOP:
                return
            self._results.put((shard, self._read(self._connections[number], shard)))

    def _read(self, connection, shard):
        cursor = connection.cursor()  # clean: closed by the finally
        try:
            cursor.execute("SELECT * FROM features WHERE shard = ?", shard)
            return cursor.fetchmany(100000)
        finally:
            cursor.close()

    def load(self, shards):
        for shard in shards:
            self._shards.put(shard)
        for _ in self._threads:
            self._shards.put(STOP)
        for thread in self._threads:
            thread.join()
        self._connections.clear()
        return dict(self._results.get() for _ in shards)
